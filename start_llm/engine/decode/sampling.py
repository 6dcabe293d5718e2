"""How a row of mlx-lm's `BatchGenerator` draws its tokens: sampler, penalties, logprobs.

Runs on the model thread. A sampler maps logprobs ``[rows, vocab]`` to token ids ``[rows]``; a processor maps
``(tokens, logits [1, vocab])`` to logits ``[1, vocab]``, where `tokens` is what the row holds so far and its last entry
is the newest token, not yet computed. Nothing here waits for it.

What happens to a row's logits, in order: `LogprobTap` (if logprobs are reported), logit bias, repetition penalty,
presence and frequency penalty, grammar mask (`engine.decode.constraint`, always last), then the sampler: top-k, top-p
and min-p cut the candidates at temperature 1, then temperature spreads what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_repetition_penalty

from start_llm.core.errors import BadRequest
from start_llm.core.events import TokenLogprob
from start_llm.core.prompt import FIRST_IMAGE_ID
from start_llm.core.request import Sampling
from start_llm.core.work import Submit, ThinkingLimit
from start_llm.engine.decode.constraint import GrammarProcessor, Grammars
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.row import Processors, Remembering

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]

_LONGEST_WINDOW = 1 << 24  # tokens a penalty may look back; longer than any context

LOWEST_LOGPROB = -9999.0  # what is reported for an impossible token; JSON has no minus infinity


def check_tokens(param: str, tokens: Iterable[int], vocab_size: int, code: str | None = None) -> None:
    """Raises BadRequest for a token id that the model does not have: looking it up would end the process."""
    strange = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if strange is not None:
        message = f"{param} names token {strange}; this model has tokens 0 to {vocab_size - 1}."
        raise BadRequest(message, param=param, code=code)


def make_sampler(sampling: Sampling, drawn: int = 0, *, own_noise: bool = False) -> Sampler:
    """A sampler for one row that has drawn so many tokens already.

    `own_noise`: it draws as if the request had a seed, so that a head can draw with the same noise.

    Rows whose samplers are the same object are drawn in one call, so equal settings without a seed give the same
    object; with a seed the sampler has the row's own keys and must not be shared.
    """
    if sampling.temperature == 0 or sampling.top_k == 1:
        return greedy_sampler  # type: ignore[no-any-return]
    if own_noise and sampling.seed is None:
        sampling = replace(sampling, seed=int(cast(int, mx.random.randint(0, 1 << 31, ()).item())))
    if sampling.seed is not None:
        return SeededSampler(sampling, drawn)
    return _unseeded_sampler(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


@lru_cache(maxsize=64)
def _unseeded_sampler(temperature: float, top_p: float, top_k: int, min_p: float) -> Sampler:
    """The same object for equal settings: rows that share it are drawn in one call."""

    def sample(logprobs: mx.array) -> mx.array:
        values, ids = candidates(logprobs, top_p=top_p, top_k=top_k, min_p=min_p)
        pick = mx.random.categorical(values * (1.0 / temperature))
        return pick if ids is None else mx.take_along_axis(ids, pick[..., None], axis=-1).squeeze(-1)

    return sample


_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: the keys of two seeds lie far apart
_64_BITS = 0xFFFFFFFFFFFFFFFF


class SeededSampler(Remembering):
    """Draws with its own keys: the same seed and logits give the same tokens, alone or beside other rows.

    The key of a token follows from the seed and the token's place in the answer, so a row that was interrupted goes
    on as it would have. Noise belongs to token ids, not to ranks: two candidates that swap places because a batch
    rounds differently do not change what is drawn.
    """

    def __init__(self, sampling: Sampling, drawn: int = 0) -> None:
        assert sampling.seed is not None
        self._sampling = sampling
        self._seed = sampling.seed * _ODD
        self._place = drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token ids [rows] of `logprobs` [rows, vocab]. Each call is the next place in the answer."""
        sampling = self._sampling
        key = mx.random.key((self._seed + self._place) & _64_BITS)
        self._place += 1
        values, ids = candidates(logprobs, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
        noise = mx.broadcast_to(mx.random.gumbel((1, logprobs.shape[-1]), key=key), logprobs.shape)
        scores = values * (1.0 / sampling.temperature)
        if ids is None:
            return mx.argmax(scores + noise, axis=-1)
        pick = mx.argmax(scores + mx.take_along_axis(noise, ids, axis=-1), axis=-1, keepdims=True)
        return mx.take_along_axis(ids, pick, axis=-1).squeeze(-1)


def candidates(logprobs: mx.array, *, top_p: float, top_k: int, min_p: float) -> tuple[mx.array, mx.array | None]:
    """The tokens that may be drawn, of `logprobs` ``[rows, vocab]``, which are normalised.

    The same set as mlx-lm's sampler chain (top-p of the whole distribution, then min-p, then top-k). Cutting to the
    top-k first gives it too, because the mass above a candidate is the same in both; then only `top_k` values need
    sorting, where sorting a vocabulary costs milliseconds on a CPU.

    Returns float32 values ``[rows, k]``, minus infinity where cut, and token ids ``[rows, k]``; ids are ``None`` where
    the columns are the whole vocabulary in order.
    """
    logprobs = logprobs.astype(mx.float32)
    vocab = logprobs.shape[-1]
    ids = None
    if 0 < top_k < vocab:
        ids = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., :top_k]
        logprobs = mx.take_along_axis(logprobs, ids, axis=-1)
    if 0 < top_p < 1:
        order = mx.argsort(-logprobs, axis=-1)
        logprobs = mx.take_along_axis(logprobs, order, axis=-1)
        ids = order if ids is None else mx.take_along_axis(ids, order, axis=-1)
        mass_above = mx.cumsum(mx.exp(logprobs), axis=-1, inclusive=False)
        logprobs = mx.where(mass_above < top_p, logprobs, -mx.inf)
    if min_p > 0:
        floor = logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    return logprobs, ids


def make_processors(sampling: Sampling, prompt_tokens: Sequence[int], generated: Sequence[int] = ()) -> list[Processor]:
    """The row's bias and penalties; empty if it has none.

    `prompt_tokens`: the whole prompt, whatever part of it comes from stored KV. `generated`: what the row has generated
    before it was interrupted.
    """
    processors: list[Processor] = []
    if sampling.logit_bias:
        processors += make_logits_processors(logit_bias=dict(sampling.logit_bias))
    if sampling.repetition_penalty != 1.0 and sampling.repetition_context_size > 0:
        size = min(sampling.repetition_context_size, _LONGEST_WINDOW)
        # An image's places have ids beyond the vocabulary: what was never written cannot be repeated.
        written = [token for token in prompt_tokens[-size:] if token < FIRST_IMAGE_ID]
        held = (*written, *generated[-size:])
        processors.append(RepetitionPenalty(sampling.repetition_penalty, size, held))
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        processors.append(CountPenalty(sampling.presence_penalty, sampling.frequency_penalty, generated))
    return processors


class RepetitionPenalty(Remembering):
    """mlx-lm's sign-aware penalty over the last `size` tokens, prompt included.

    The window is kept here, because what `BatchGenerator` passes as tokens leaves out a prefix that came with its KV
    unless the caller repeats it.
    """

    def __init__(self, penalty: float, size: int, held: Sequence[int]) -> None:
        """`held`: the tokens before the next one, at least the last `size`."""
        self._penalise: Processor = make_repetition_penalty(penalty, size)
        self._size = size
        self._window = mx.array(list(held[-size:]), dtype=mx.int32)
        self._started = False

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, vocab], penalised. The first call's newest token is in the window already."""
        if self._started:
            self._window = mx.concatenate([self._window, tokens[-1:]])[-self._size :]
        self._started = True
        return self._penalise(self._window, logits)


class CountPenalty(Remembering):
    """OpenAI's presence and frequency penalties: over the generated tokens only, all of them.

    (mlx-lm's own look at the last 20 tokens, prompt included.)
    """

    def __init__(self, presence: float, frequency: float, generated: Sequence[int] = ()) -> None:
        self._presence = presence
        self._frequency = frequency
        self._before = generated
        self._counts: mx.array | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, vocab], less the penalties. All calls but the first bring a new token, the last of `tokens`."""
        if self._counts is None:  # the first call's newest token is known already, or the prompt's last
            counts = np.bincount(np.asarray(self._before, dtype=np.int64), minlength=logits.shape[-1])
            self._counts = mx.array(counts.astype(np.float32))
        else:
            self._counts = self._counts.at[tokens[-1:]].add(1.0)
        penalty = self._frequency * self._counts + self._presence * (self._counts > 0)
        return logits - penalty.astype(logits.dtype)


class ThinkingBudget(Remembering):
    """A logits processor that forces the end-of-reasoning token when the budget is used up.

    It reads each new token, which costs the decode step its head start; only requests with a budget have it.
    """

    def __init__(self, limit: ThinkingLimit, generated: Sequence[int] = ()) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._used = 0
        self._started = False
        for token in generated:
            self._see(token)

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """Logits [1, vocab]; with the budget used up, minus infinity for all but the end of reasoning."""
        if self._started:
            self._see(int((tokens if tokens.size == 1 else tokens[-1]).item()))
        self._started = True
        if not self._inside or self._used < self._limit.tokens:
            return logits
        allowed = np.zeros(logits.shape[-1], dtype=bool)
        allowed[self._limit.closes] = True
        return mx.where(mx.array(allowed)[None], logits, -float("inf"))

    def _see(self, token: int) -> None:
        if token == self._limit.closes:
            self._inside = False
        elif self._inside:
            self._used += 1
        elif token == self._limit.opens:
            self._inside = True


class LogprobTap(Remembering):
    """Keeps the model's own logprobs for a row that reports them; goes first in the row's processors.

    What `BatchGenerator` reports is the distribution after bias, penalties and mask. `BatchGenerator` answers one
    step late: at its k-th response of a row, k + 1 distributions have passed, so they wait in a queue.
    """

    def __init__(self) -> None:
        self._waiting: tuple[mx.array, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        # A new array, for a later processor may write into this one in place.
        self._waiting = (*self._waiting, logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return logits

    def take(self) -> mx.array:
        """Logprobs ``[vocab]`` that the row's next reported token was drawn from; call once per response."""
        first, self._waiting = self._waiting[0], self._waiting[1:]
        return first[0]


def top_logprobs(logprobs: mx.array, token: int, n: int) -> TokenLogprob:
    """The logprob of `token`, and the `n` likeliest tokens, best first: it may be one of them, impossible ones are not.

    `logprobs`: ``[vocab]``, from `LogprobTap.take`.
    """
    row = logprobs.reshape(-1).astype(mx.float32)
    n = min(n, row.size)
    top: list[tuple[int, float]] = []
    if n > 0:
        ids = mx.argpartition(-row, kth=n - 1)[:n]
        pairs = zip(cast(list[int], ids.tolist()), cast(list[float], row[ids].tolist()), strict=True)
        top = sorted(((i, v) for i, v in pairs if v > -math.inf), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, max(cast(float, row[token].item()), LOWEST_LOGPROB), tuple(top))


class Guarded:
    """A sampler or processor whose errors are told to its row and do not end the step.

    `inner`: the sampler or processor itself.
    """

    def __init__(
        self, inner: Callable[..., Any], failed: Callable[[Exception], None], instead: Callable[..., Any]
    ) -> None:
        self.inner, self._failed, self._instead = inner, failed, instead

    def __call__(self, *given: Any) -> Any:
        """What goes wrong is told to `failed`, and `instead` answers: the step goes on for other rows."""
        try:
            return self.inner(*given)
        except Exception as error:  # noqa: BLE001 - raised by `TextDrawing.logprob`
            self._failed(error)
            return self._instead(*given)


class TextDrawing:
    """A row's sampler, processors (logprob tap first, grammar mask last) and logprobs.

    The rows of a step are drawn one after the other: what one row's processor raises is kept until the row's token
    is reported, so that the step goes on for the others.

    `generated`: what the row has generated before it was interrupted.
    """

    def __init__(
        self,
        work: Submit,
        grammars: Grammars | None,
        generated: Sequence[int] = (),
        drafts: Drafts | None = None,
    ) -> None:
        self.drafts = drafts.begin(work, generated) if drafts is not None else RowDrafts()
        self._error: Exception | None = None
        self._top = work.logprobs
        self._tap = LogprobTap() if work.logprobs is not None else None
        own_noise = drafts is not None and drafts.gate.head is not None and work.sampling.drafts
        self.sampler: Callable[[Any], Any] = make_sampler(work.sampling, len(generated), own_noise=own_noise)
        if isinstance(self.sampler, SeededSampler):  # another one is shared, and has no state that could go wrong
            self.sampler = Guarded(self.sampler, self._failed, lambda logprobs: mx.argmax(logprobs, axis=-1))
        processors: list[Any] = [self._tap] if self._tap is not None else []
        processors += make_processors(work.sampling, work.prompt.tokens, generated)
        if work.thinking is not None:
            processors.append(ThinkingBudget(work.thinking, generated))
        self._grammar: GrammarProcessor | None = None
        if work.constraint is not None and grammars is not None:
            self._grammar = grammars.processor(work.constraint, generated)
            processors.append(self._grammar)
        self.processors: Processors = [
            Guarded(processor, self._failed, lambda tokens, logits: logits) for processor in processors
        ]

    def _failed(self, error: Exception) -> None:
        self._error = self._error or error

    def logprob(self, token: int) -> TokenLogprob | None:
        """Of the row's next reported token, if the client asked; called once per token, in order.

        Raises what went wrong in the row's own sampler, penalties or grammar: such a request ends with an error,
        never with garbage, and the other rows of the step do not notice.
        """
        if self._error is not None:
            raise self._error
        if self._grammar is not None and self._grammar.error is not None:
            raise self._grammar.error
        if self._tap is None or self._top is None:
            return None
        return top_logprobs(self._tap.take(), token, self._top)
