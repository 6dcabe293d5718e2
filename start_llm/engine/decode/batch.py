"""mlx-lm's `BatchGenerator`: rows that decode together. Model thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, dynamic_roll

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode import layerwise
from start_llm.engine.decode.head import HiddenTail
from start_llm.engine.decode.row import Cache, DecodeRow, RowState
from start_llm.engine.decode.verify import accepted, draw_block, grammar_of, stateful_parts
from start_llm.engine.decode.wired import no_wired_limit
from start_llm.kvcache.layers import make_room


def eval_cache(cache: Cache) -> None:
    """Evaluates a row's KV on the model thread: lazy arrays must not outlive the step that made them."""
    mx.eval([layer.state for layer in cache])


class BatchRunner:
    """Decodes all rows together; prefills one row at a time. Its methods are those of `ModelRunner`.

    Prefill does not go through the generator: a row of its own can pause at any token, which checkpoints, cancels and
    requests that wait for a shared prefix need, and rows of different lengths are never padded against each other.

    The generator is a step ahead: it has drawn the token behind the one that it reports. `suspend` takes that token
    along, so that nothing is drawn twice. `verify` goes on from that token with a block of each row. Uses of mlx-lm's
    internals: `BatchGenerator._generation_batch` and there `uids`, `tokens`, `max_tokens`, `_num_tokens`,
    `_next_tokens`, `_next_logprobs`, `prompt_cache`; `BatchKVCache._idx`; `dynamic_roll`.
    """

    def __init__(self, model: Any, *, eos: Iterable[int], max_rows: int) -> None:
        self.max_rows = max_rows
        self._model = model
        self._eos = frozenset(eos)
        self._rows: dict[int, RowState] = {}  # less their KV, tokens and counts, which the generator has
        self._resumed: set[int] = set()  # rows whose first token was drawn before they came, until it is reported
        self._batch = self._generator()

    def _generator(self) -> BatchGenerator:
        with no_wired_limit():
            return BatchGenerator(
                self._model,
                stop_tokens=[[token] for token in sorted(self._eos)],
                completion_batch_size=self.max_rows,
                prefill_batch_size=self.max_rows,
            )

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        """One row's `tokens` into `cache`, evaluated. Returns the most bytes allocated, less those before."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with mx.stream(self._batch.stream):
            make_room(cache, len(tokens))
            if images:
                self._model.see(tokens, cache, images)
            else:
                self._model(mx.array(list(tokens))[None], cache=cache)
            eval_cache(cache)
        taken = mx.get_peak_memory() - before
        mx.clear_cache()
        return max(0, taken)

    def insert(self, row: RowState) -> int:
        """A row joins; the batch takes its KV and tokens. Returns its uid in this batch."""
        # The generator feeds the newest token and does not report it. In a fresh row that is the prompt's last
        # token; else it is an answer's token that was drawn elsewhere, and `_resumed` reports it: one less is left.
        (uid,) = self._batch.insert(
            [[row.newest]],
            max_tokens=[row.left - (not row.fresh)],
            caches=[layerwise.batchable(row.cache)],
            all_tokens=[row.tokens],
            samplers=[row.sampler],
            logits_processors=[list(row.processors)],
        )
        self._rows[uid] = row
        if not row.fresh:
            self._resumed.add(uid)
        row.tokens = []
        row.on_move(partial(self._read, uid))
        return int(uid)

    def _read(self, uid: int, place: int | None = None) -> Cache:
        """A row's layers, wherever they are: see `KVReader`."""
        running = self._batch._generation_batch
        if uid in running.uids:
            return layerwise.read_row(running.prompt_cache, running.uids.index(uid), place)
        return layerwise.read_row(self._rows[uid].cache, 0, place)

    def _out(self, row: RowState, cache: Cache) -> Cache:
        """The row has left the batch with these layers: they are put where its KV was before."""
        row.cache[:] = cache
        row.on_move(None)
        return row.cache

    def decode(self) -> list[DecodeRow]:
        """One pass: each row feeds and reports the token that it drew before, and draws its next one."""
        with mx.stream(self._batch.stream):
            layerwise.make_room(self._batch._generation_batch.prompt_cache, 1)
            _, responses = self._batch.next()
            layerwise.eval_rows([r.prompt_cache for r in responses if r.prompt_cache is not None])
        for uid in self._batch._generation_batch.uids:
            self._rows[uid].cache.clear()  # the batch has copies of states
        rows = []
        for r in responses:
            cache = None if r.prompt_cache is None else self._out(self._rows.pop(r.uid), r.prompt_cache)
            rows.append(DecodeRow(r.uid, r.token, r.logprobs, r.finish_reason, cache, r.all_tokens))
        for uid in self._resumed.intersection(self._batch._generation_batch.uids):
            self._resumed.remove(uid)
            rows.append(DecodeRow(uid, self._rows[uid].newest))
        return rows

    @property
    def verifies(self) -> bool:
        """Whether `verify` may be called now: every row has begun, and every layer can be cut."""
        running = self._batch._generation_batch
        whole = len(running.uids) == len(self._rows) and not self._resumed
        return whole and all(isinstance(layer, BatchKVCache | HiddenTail) for layer in running.prompt_cache)

    def tokens(self, uid: int) -> list[int]:
        """What lies in a row's KV, once it has begun."""
        running = self._batch._generation_batch
        return cast(list[int], running.tokens[running.uids.index(uid)])

    def is_free(self, uid: int) -> bool:
        """No grammar says what the row may say."""
        return grammar_of(self._rows[uid]) is None

    def pending(self) -> dict[int, tuple[int, int]] | None:
        """By row the token that is drawn but not in the KV, and how many the row may say yet, that one included.

        Waits for the device. ``None``: a row ends with its token.
        """
        running = self._batch._generation_batch
        newest = running._next_tokens.tolist()
        left = [most - said for most, said in zip(running.max_tokens, running._num_tokens, strict=True)]
        if any(token in self._eos for token in newest) or min(left) <= 1:
            return None
        return dict(zip(running.uids, zip(newest, left, strict=True), strict=True))

    def verify(self, drafts: Mapping[int, list[int]]) -> tuple[dict[int, list[int]], int]:
        """A pass over each row's pending token and its draft, of whatever length, behind `pending`.

        No draft reaches to the end of its row's answer. Returns what each row has said (that token and what is right of
        its draft), and the tokens of each row that were computed.
        """
        running = self._batch._generation_batch
        newest = running._next_tokens.tolist()
        blocks = [[token, *self._inside(drafts[uid])] for uid, token in zip(running.uids, newest, strict=True)]
        width = max(map(len, blocks))
        said, pending, behind = dict[int, list[int]](), list[int](), list[mx.array]()
        with mx.stream(self._batch.stream):
            fed = mx.array([[*block, *block[:1] * (width - len(block))] for block in blocks])
            layerwise.make_room(running.prompt_cache, width)
            logits = self._model(fed, cache=running.prompt_cache)
            for row, (uid, block) in enumerate(zip(running.uids, blocks, strict=True)):
                state = self._rows[uid]
                stateful = stateful_parts(state)
                drawn, states = draw_block(state, stateful, block, logits[row, : len(block)])
                right = accepted(block[1:], drawn, stateful, states)
                said[uid] = block[: right + 1]
                pending.append(drawn[right])
                behind.append(logits[row, right] - mx.logsumexp(logits[row, right]))
                running.tokens[row].extend(said[uid])
                running._num_tokens[row] += right + 1
            running._next_tokens, running._next_logprobs = mx.array(pending, running._next_tokens.dtype), behind
            tails = [layer for layer in running.prompt_cache if isinstance(layer, HiddenTail)]
            cut = [layer for layer in running.prompt_cache if not isinstance(layer, HiddenTail)]
            _cut(cut, [width - len(tokens) for tokens in said.values()])
            for tail in tails:
                tail.keep_behind([len(tokens) for tokens in said.values()])
            mx.eval([[layer.keys, layer.values, layer.offset, layer.left_padding] for layer in cut])
            mx.eval([tail.cache for tail in tails])
        return said, width

    def _inside(self, draft: list[int]) -> list[int]:
        """As much of a draft as does not end the answer."""
        return draft[: next((i for i, token in enumerate(draft) if token in self._eos), len(draft))]

    def suspend(self, uid: int) -> RowState | None:
        """Takes a row out, with the token that it has drawn, to go on later. ``None``: it has not begun, or ends."""
        running = self._batch._generation_batch
        if uid not in running.uids or uid in self._resumed:
            return None
        index = running.uids.index(uid)
        with mx.stream(self._batch.stream):
            token = cast(int, running._next_tokens[index].item())
        left = running.max_tokens[index] - running._num_tokens[index]
        if token in self._eos or left <= 1:
            return None
        row, removed = self._rows[uid], self.remove(uid)
        if removed is None:
            return None
        row.tokens = removed[1]
        row.newest, row.left, row.fresh = token, left, False
        return row

    def remove(self, uid: int) -> tuple[Cache, list[int]] | None:
        """Takes a row out for good: its KV, evaluated, and the tokens in it. ``None``: it is not here."""
        row = self._rows.pop(uid, None)
        self._resumed.discard(uid)
        with mx.stream(self._batch.stream):
            found = self._batch.remove([uid], return_prompt_caches=True).get(uid)
            if found is None:
                return None
            cache, tokens = found
            layerwise.eval_rows([cache])
        return (cache if row is None else self._out(row, cache)), tokens

    def clear(self) -> None:
        self._rows.clear()
        self._resumed.clear()
        self._batch = self._generator()
        mx.clear_cache()

    def close(self) -> None:
        self._batch.close()


def _cut(layers: Sequence[BatchKVCache], wrong: Sequence[int]) -> None:
    """Takes the newest tokens out of each row's KV, so many of each row.

    The rows end at the same place afterwards, so those of which more is wrong move: towards the end, or, where no row
    is padded any more, the others towards the beginning.
    """
    first = layers[0]
    padding = np.array(first.left_padding)
    ends = first._idx - np.array(wrong)
    end = int((ends - padding).max())
    shifts = mx.array(end - ends, mx.int32)
    for layer in layers:
        if (end != ends).any():
            layer.keys = dynamic_roll(layer.keys, shifts[:, None], axis=2)
            layer.values = dynamic_roll(layer.values, shifts[:, None], axis=2)
            mx.eval(layer.keys, layer.values)  # one layer at a time is there twice
        layer.offset = layer.offset - mx.array(list(wrong))
        layer.left_padding = layer.left_padding + shifts
        layer._idx = end
