"""mlx-lm's generators as `Runner`s: continuous batching, or one row at a time for quantised KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, maybe_quantize_kv_cache

from start_llm.engine.runner import Cache, Row
from start_llm.engine.wired import no_wired_limit


def eval_cache(cache: Cache) -> None:
    """Evaluates a row's KV on the model thread: lazy arrays must not outlive the step that made them."""
    mx.eval([layer.state for layer in cache])


class BatchRunner:
    """Decodes all rows together with `BatchGenerator`; prefills one row at a time.

    Prefill does not go through the generator: a row of its own can pause at any
    token, which checkpoints, cancels and requests that wait for a shared prefix
    need, and rows of different lengths are never padded against each other.
    """

    def __init__(self, model: Any, *, eos: Iterable[int], max_rows: int) -> None:
        self.max_rows = max_rows
        self._model = model
        self._eos = sorted(eos)
        self._batch = self._generator()

    def _generator(self) -> BatchGenerator:
        with no_wired_limit():
            return BatchGenerator(
                self._model,
                stop_tokens=[[token] for token in self._eos],
                completion_batch_size=self.max_rows,
                prefill_batch_size=self.max_rows,
            )

    def prefill(self, cache: Cache, tokens: Sequence[int]) -> None:
        with mx.stream(self._batch.stream):
            self._model(mx.array(list(tokens))[None], cache=cache)
            eval_cache(cache)
        mx.clear_cache()

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Callable[[Any], Any],
        processors: Sequence[Callable[[Any, Any], Any]],
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

    def decode(self) -> list[Row]:
        _, responses = self._batch.next()
        rows = []
        for r in responses:
            if r.prompt_cache is not None:
                with mx.stream(self._batch.stream):
                    eval_cache(r.prompt_cache)
            rows.append(Row(r.uid, r.token, r.logprobs, r.finish_reason, r.prompt_cache, r.all_tokens))
        return rows

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        with mx.stream(self._batch.stream):
            found = self._batch.remove([uid], return_prompt_caches=True).get(uid)
            if found is None:
                return None
            cache, tokens = found
            eval_cache(cache)
        return cache, tokens

    def clear(self) -> None:
        self._batch = self._generator()
        mx.clear_cache()

    def close(self) -> None:
        self._batch.close()


class SequentialRunner:
    """One row at a time, with its KV quantised on the way: mlx-lm cannot batch a quantised KV."""

    max_rows = 1

    def __init__(
        self, model: Any, *, eos: Iterable[int], kv_bits: int, kv_group_size: int, quantized_kv_start: int
    ) -> None:
        self._model = model
        self._eos = frozenset(eos)
        self._bits, self._group, self._start = kv_bits, kv_group_size, quantized_kv_start
        self._uid = 0
        self._row: _SequentialRow | None = None

    def _quantise(self, cache: Cache) -> None:
        maybe_quantize_kv_cache(cache, quantized_kv_start=self._start, kv_group_size=self._group, kv_bits=self._bits)

    def prefill(self, cache: Cache, tokens: Sequence[int]) -> None:
        self._model(mx.array(list(tokens))[None], cache=cache)
        self._quantise(cache)
        eval_cache(cache)
        mx.clear_cache()

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Callable[[Any], Any],
        processors: Sequence[Callable[[Any, Any], Any]],
    ) -> int:
        if self._row is not None:
            raise RuntimeError("quantised KV is served one request at a time")
        self._uid += 1
        row = _SequentialRow(self._uid, list(tokens[:-1]), cache, max_tokens, sampler, list(processors))
        row.next = mx.array(list(tokens[-1:]))
        self._advance(row)
        self._row = row
        return row.uid

    def _advance(self, row: _SequentialRow) -> tuple[int, Any]:
        """Feeds the pending token, samples the one after it; returns the fed token and its logprobs."""
        fed, logprobs = row.next, row.logprobs
        logits = self._model(fed[None], cache=row.cache)[:, -1, :]
        self._quantise(row.cache)
        token = int(fed.item())
        row.tokens.append(token)
        for processor in row.processors:
            logits = processor(mx.array(row.tokens), logits)
        row.logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
        row.next = row.sampler(row.logprobs[None])
        mx.async_eval(row.next, row.logprobs)  # type: ignore[no-untyped-call]
        return token, logprobs

    def decode(self) -> list[Row]:
        row = self._row
        if row is None:
            return []
        token, logprobs = self._advance(row)
        row.left -= 1
        if token not in self._eos and row.left > 0:
            return [Row(row.uid, token, logprobs)]
        self._row = None
        eval_cache(row.cache)
        finish: Literal["stop", "length"] = "stop" if token in self._eos else "length"
        return [Row(row.uid, token, logprobs, finish, row.cache, row.tokens)]

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        row = self._row
        if row is None or row.uid != uid:
            return None
        self._row = None
        eval_cache(row.cache)
        return row.cache, row.tokens

    def clear(self) -> None:
        self._row = None

    def close(self) -> None:
        self._row = None


@dataclass(slots=True)
class _SequentialRow:
    uid: int
    tokens: list[int]
    cache: Cache
    left: int
    sampler: Callable[[Any], Any]
    processors: list[Callable[[Any, Any], Any]]
    next: Any = None
    logprobs: Any = None
