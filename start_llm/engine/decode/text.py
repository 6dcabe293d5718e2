"""mlx-lm's `BatchGenerator` as a `Runner`: continuous batching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.runner import Cache, DecodeRow, Processors, Sampler, Suspended
from start_llm.engine.decode.wired import no_wired_limit

_SAMPLE = (0, 0)


def eval_cache(cache: Cache) -> None:
    """Evaluates a row's KV on the model thread: lazy arrays must not outlive the step that made them."""
    mx.eval([layer.state for layer in cache])


class BatchRunner:
    """Decodes all rows together with `BatchGenerator`; prefills one row at a time.

    Prefill does not go through the generator: a row of its own can pause at any
    token, which checkpoints, cancels and requests that wait for a shared prefix
    need, and rows of different lengths are never padded against each other.

    The generator is a step ahead: it has drawn the token behind the one that it reports. `suspend` takes that token
    along, so that nothing is drawn twice. Uses of mlx-lm's internals: `BatchGenerator._generation_batch` and there
    `uids`, `max_tokens`, `_num_tokens`, `_next_tokens`.
    """

    def __init__(self, model: Any, *, eos: Iterable[int], max_rows: int) -> None:
        self.max_rows = max_rows
        self._model = model
        self._eos = frozenset(eos)
        self._resumed: dict[int, int] = {}  # the token that a row begins with, until it is reported
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
            if images:
                self._model.see(tokens, cache, images)
            else:
                self._model(mx.array(list(tokens))[None], cache=cache)
            eval_cache(cache)
        taken = mx.get_peak_memory() - before
        mx.clear_cache()
        return max(0, taken)

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        (uid,) = self._batch.insert(
            [[tokens[-1]]],
            max_tokens=[max_tokens],
            caches=[cache],
            all_tokens=[list(tokens[:-1])],
            samplers=[sampler],
            logits_processors=[list(processors)],
        )
        return int(uid)

    def decode(self) -> list[DecodeRow]:
        _, responses = self._batch.next()
        rows = []
        for r in responses:
            if r.prompt_cache is not None:
                with mx.stream(self._batch.stream):
                    eval_cache(r.prompt_cache)
            rows.append(DecodeRow(r.uid, r.token, r.logprobs, r.finish_reason, r.prompt_cache, r.all_tokens))
        for uid in [uid for uid in self._batch._generation_batch.uids if uid in self._resumed]:
            rows.append(DecodeRow(uid, self._resumed.pop(uid), None))
        return rows

    def suspend(self, uid: int) -> Suspended | None:
        running = self._batch._generation_batch
        if uid not in running.uids or uid in self._resumed:
            return None
        index = running.uids.index(uid)
        with mx.stream(self._batch.stream):
            token = cast(int, running._next_tokens[index].item())
        if token in self._eos or running.max_tokens[index] - running._num_tokens[index] <= 1:
            return None
        removed = self.remove(uid)
        return None if removed is None else Suspended(*removed, token)

    def resume(
        self,
        row: Suspended,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        # The generator takes the drawn token for the end of a prompt: it feeds it but does not report it.
        tokens = [*row.tokens, row.token]
        uid = self.insert(tokens, row.cache, max_tokens=max_tokens - 1, sampler=sampler, processors=processors)
        self._resumed[uid] = row.token
        return uid

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        self._resumed.pop(uid, None)
        with mx.stream(self._batch.stream):
            found = self._batch.remove([uid], return_prompt_caches=True).get(uid)
            if found is None:
                return None
            cache, tokens = found
            eval_cache(cache)
        return cache, tokens

    def clear(self) -> None:
        self._resumed.clear()
        self._batch = self._generator()
        mx.clear_cache()

    def close(self) -> None:
        self._batch.close()
