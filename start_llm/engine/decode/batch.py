"""mlx-lm's `BatchGenerator`: rows that decode together. Model thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.row import Cache, DecodeRow, RowState
from start_llm.engine.decode.wired import no_wired_limit
from start_llm.kvcache.layers import make_room

_SAMPLE = (0, 0)


def eval_cache(cache: Cache) -> None:
    """Evaluates a row's KV on the model thread: lazy arrays must not outlive the step that made them."""
    mx.eval([layer.state for layer in cache])


class BatchRunner:
    """Decodes all rows together; prefills one row at a time. Its methods are those of `ModelRunner`.

    Prefill does not go through the generator: a row of its own can pause at any token, which checkpoints, cancels and
    requests that wait for a shared prefix need, and rows of different lengths are never padded against each other.

    The generator is a step ahead: it has drawn the token behind the one that it reports. `suspend` takes that token
    along, so that nothing is drawn twice. Uses of mlx-lm's internals: `BatchGenerator._generation_batch` and there
    `uids`, `max_tokens`, `_num_tokens`, `_next_tokens`.
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

    def sample(self) -> tuple[int, Cache]:
        cache = make_prompt_cache(self._model)
        self.prefill(cache, _SAMPLE)
        return len(_SAMPLE), cache

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
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
        row.on_copy()
        # The generator takes a token that was drawn for the end of a prompt: it feeds it but does not report it.
        (uid,) = self._batch.insert(
            [[row.newest]],
            max_tokens=[row.left - (not row.fresh)],
            caches=[row.cache],
            all_tokens=[row.tokens],
            samplers=[row.sampler],
            logits_processors=[list(row.processors)],
        )
        self._rows[uid] = row
        if not row.fresh:
            self._resumed.add(uid)
        row.cache, row.tokens = [], []
        return int(uid)

    def decode(self) -> list[DecodeRow]:
        _, responses = self._batch.next()
        rows = []
        for r in responses:
            if r.prompt_cache is not None:
                del self._rows[r.uid]
                with mx.stream(self._batch.stream):
                    eval_cache(r.prompt_cache)
            rows.append(DecodeRow(r.uid, r.token, r.logprobs, r.finish_reason, r.prompt_cache, r.all_tokens))
        for uid in self._resumed.intersection(self._batch._generation_batch.uids):
            self._resumed.remove(uid)
            rows.append(DecodeRow(uid, self._rows[uid].newest))
        return rows

    def suspend(self, uid: int) -> RowState | None:
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
        row.cache, row.tokens = removed
        row.newest, row.left, row.fresh = token, left, False
        return row

    def remove(self, uid: int) -> tuple[Cache, list[int]] | None:
        self._rows.pop(uid, None)
        self._resumed.discard(uid)
        with mx.stream(self._batch.stream):
            found = self._batch.remove([uid], return_prompt_caches=True).get(uid)
            if found is None:
                return None
            cache, tokens = found
            eval_cache(cache)
        return cache, tokens

    def clear(self) -> None:
        self._rows.clear()
        self._resumed.clear()
        self._batch = self._generator()
        mx.clear_cache()

    def close(self) -> None:
        self._batch.close()
