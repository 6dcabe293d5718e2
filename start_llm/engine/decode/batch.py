"""Rows that decode together. Model thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import _extend_cache, _merge_caches, generation_stream
from mlx_lm.models.cache import BatchKVCache, dynamic_roll, make_prompt_cache

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode import layerwise
from start_llm.engine.decode.head import HiddenTail
from start_llm.engine.decode.row import Cache, DecodeRow, RowState
from start_llm.engine.decode.verify import accepted, draw_block, normalised, processed, stateful_parts
from start_llm.kvcache.layers import make_room

_SAMPLE = (0, 0)
_NO_TOKENS = mx.array([], mx.uint32)


def eval_cache(cache: Cache) -> None:
    """Evaluates a row's KV on the model thread: lazy arrays must not outlive the step that made them."""
    mx.eval([layer.state for layer in cache])


class BatchRunner:
    """Decodes all rows together; prefills one row at a time.

    In prefill a row has caches of its own: so it can pause at any token, which checkpoints, cancels and requests that
    wait for a shared prefix need, and rows of different lengths are never padded against each other.

    A pass is a step ahead: it begins with tokens that the last one has drawn and that nobody has read yet. They are
    read, and reported, while it runs. Uses of mlx-lm's internals: `_extend_cache`, `_merge_caches`, `dynamic_roll`,
    `BatchKVCache._idx`.

    Attributes:
        rows: by their uids, in the order of the batch. Their `newest` is true again when they leave.
    """

    def __init__(self, model: Any, *, eos: Iterable[int]) -> None:
        self.rows: dict[int, RowState] = {}
        self._model, self._eos = model, frozenset(eos)
        self._layers: Cache = []
        self._newest = _NO_TOKENS

    def sample(self) -> tuple[int, Cache]:
        cache = make_prompt_cache(self._model)
        self.prefill(cache, _SAMPLE)
        return len(_SAMPLE), cache

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with mx.stream(generation_stream):
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
        """The row takes part from the next pass on. Its KV holds a token at least, and is the batch's until it leaves.

        Returns its uid.
        """
        with mx.stream(generation_stream):
            self._layers = _extend_cache(self._layers, _merge_caches([layerwise.batchable(row.cache)]))
            self._newest = mx.concatenate([self._newest, mx.array([row.newest], mx.uint32)])
        self.rows[row.uid] = row
        row.cache.clear()  # the batch has copies of states
        row.on_move(partial(self._read, row.uid))
        return row.uid

    def _read(self, uid: int, place: int | None = None) -> Cache:
        """A row's layers in the batch: see `KVReader`."""
        return layerwise.read_row(self._layers, list(self.rows).index(uid), place)

    def decode(self) -> list[DecodeRow]:
        """A pass over the newest token of each row. Reports these tokens, but for those that end a prompt."""
        if not self.rows:
            return []
        fed, rows = self._newest, list(self.rows.values())
        with mx.stream(generation_stream):
            layerwise.make_room(self._layers, 1)
            logits = self._model(fed[:, None], cache=self._layers)[:, -1, :]
            self._newest = _drawn(rows, fed, logits)
            mx.async_eval(self._newest)  # type: ignore[no-untyped-call]
            tokens = cast(list[int], fed.tolist())
        results = []
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
            if not row.fresh:
                row.drafts.counts.forwards += 1
                results.append(row.report(token, self._eos))
            row.fresh = False
        ended = [result for result in results if result.finish is not None]
        for result, row in zip(ended, self._take_out([result.uid for result in ended]), strict=True):
            result.cache, result.tokens = row.cache, row.tokens
        return results

    @property
    def verifies(self) -> bool:
        """Whether `verify` may be called now: every row has begun, and every layer can be cut."""
        layers = (isinstance(layer, BatchKVCache | HiddenTail) for layer in self._layers)
        return all(layers) and not any(row.fresh for row in self.rows.values())

    def pending(self) -> dict[int, int] | None:
        """By row the token that is drawn but not in the KV. Waits for the device. ``None``: a row ends with it."""
        newest = cast(list[int], self._newest.tolist())
        if any(token in self._eos for token in newest) or any(row.left <= 1 for row in self.rows.values()):
            return None
        return dict(zip(self.rows, newest, strict=True))

    def verify(self, drafts: Mapping[int, list[int]]) -> tuple[dict[int, list[int]], int]:
        """A pass over each row's pending token and its draft, of whatever length, behind `pending`.

        No draft reaches to the end of its row's answer. Returns what each row has said (that token and what is right of
        its draft), and the tokens of each row that were computed.
        """
        newest = cast(list[int], self._newest.tolist())
        blocks = [[token, *self._inside(drafts[uid])] for uid, token in zip(self.rows, newest, strict=True)]
        width = max(map(len, blocks))
        said, pending = dict[int, list[int]](), list[int]()
        with mx.stream(generation_stream):
            fed = mx.array([[*block, *block[:1] * (width - len(block))] for block in blocks])
            layerwise.make_room(self._layers, width)
            logits = self._model(fed, cache=self._layers)
            for place, row in enumerate(self.rows.values()):
                block, stateful = blocks[place], stateful_parts(row)
                drawn, states = draw_block(row, stateful, block, logits[place, : len(block)])
                right = accepted(block[1:], drawn, stateful, states)
                said[row.uid] = block[: right + 1]
                pending.append(drawn[right])
                row.tokens += said[row.uid]
                row.left -= right + 1
            self._newest = mx.array(pending, mx.uint32)
            tails = [layer for layer in self._layers if isinstance(layer, HiddenTail)]
            cut = [layer for layer in self._layers if not isinstance(layer, HiddenTail)]
            _cut(cut, [width - len(tokens) for tokens in said.values()])
            for tail in tails:
                tail.keep_behind([len(tokens) for tokens in said.values()])
            mx.eval([[layer.keys, layer.values, layer.offset, layer.left_padding] for layer in cut])
            mx.eval([tail.cache for tail in tails])
        return said, width

    def _inside(self, draft: list[int]) -> list[int]:
        """As much of a draft as does not end the answer."""
        return draft[: next((i for i, token in enumerate(draft) if token in self._eos), len(draft))]

    def remove(self, uid: int) -> RowState:
        """Takes a row out as it is between two passes, its KV evaluated."""
        return self._take_out([uid])[0]

    def _take_out(self, uids: Sequence[int]) -> list[RowState]:
        """Rows leave the batch, and their KV goes where it was before."""
        if not uids:
            return []
        places = [list(self.rows).index(uid) for uid in uids]
        keep = [place for place, uid in enumerate(self.rows) if uid not in uids]
        with mx.stream(generation_stream):
            caches = [[layer.extract(place) for layer in self._layers] for place in places]
            newest = self._newest
            if keep:
                for layer in self._layers:
                    layer.filter(keep)
                self._newest = self._newest[mx.array(keep)]
            else:
                self._layers, self._newest = [], _NO_TOKENS
            layerwise.eval_rows(caches)
        left = [self.rows.pop(uid) for uid in uids]
        for row, place, cache in zip(left, places, caches, strict=True):
            row.newest, row.cache[:] = newest[place : place + 1], cache
            row.on_move(None)
        return left

    def clear(self) -> None:
        """Drops all rows, in whatever state a failed pass has left them."""
        self.rows.clear()
        self._layers, self._newest = [], _NO_TOKENS
        mx.clear_cache()


def _drawn(rows: Sequence[RowState], fed: mx.array, logits: mx.array) -> mx.array:
    """What follows the tokens that were fed, [rows]. Rows that share a sampler are drawn in one call."""
    if any(row.processors for row in rows):
        logits = mx.concatenate([processed(row, fed[i : i + 1], logits[i : i + 1]) for i, row in enumerate(rows)])
    logprobs, sampler = normalised(logits), rows[0].sampler
    if all(row.sampler is sampler for row in rows):
        return cast(mx.array, sampler(logprobs))
    return mx.concatenate([row.sampler(logprobs[i : i + 1]) for i, row in enumerate(rows)])


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
