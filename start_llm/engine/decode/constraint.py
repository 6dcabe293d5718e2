"""Decoding under a grammar: llguidance as a logits processor (what it costs: docs/engine.md).

`Grammars` belongs to a model and may be used from any thread; a `GrammarProcessor` belongs to one row and the model
thread. It goes last in the row's list, so that neither bias nor penalty can undo the mask. It launches the forward pass
first, and computes the mask without the GIL while that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from start_llm.core.errors import BadRequest, NotSupported, StartLLMError
from start_llm.core.work import Constraint
from start_llm.engine.decode.row import Remembering
from start_llm.files.lru import Lru

KEPT_GRAMMARS = 64
LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
"""An optional property takes four items of a row, and `core.limits.SUBSCHEMAS` allows 3,000 of them. With the default
of 2,000 items an answer would fail in the middle of its object."""


class Grammars:
    """A model's vocabulary as llguidance sees it, and the grammars compiled last.

    Most requests need none, and a large vocabulary takes seconds: it is made when the first one does.

    Compiling takes from half a millisecond to many seconds (a few lines can ask for a million states), so `prepare` it
    on a thread that can be given up (`patience`); `processor` then only copies.

    `wrapper`: the tokenizer, as it was given.
    """

    def __init__(self, tokenizer: Any, eos_tokens: Iterable[int]) -> None:
        """`tokenizer`: Hugging Face's fast tokenizer, or mlx-lm's wrapper around it. `eos_tokens`: every token that
        ends a generation.
        """
        self.wrapper = tokenizer
        self._inner = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
        self._eos = tuple(sorted(set(eos_tokens)))
        self._making = threading.Lock()
        self._made: LLTokenizer | NotSupported | None = None
        self._compiled: Lru[str, LLMatcher] = Lru(KEPT_GRAMMARS)

    def make_vocabulary(self) -> LLTokenizer:
        """Takes seconds the first time. Any thread. Raises NotSupported: llguidance cannot read this tokenizer."""
        with self._making:
            if self._made is None:
                self._made = _vocabulary_of(self._inner, self._eos)
        if isinstance(self._made, NotSupported):
            raise self._made.again()
        return self._made

    def prepare(self, constraint: Constraint) -> Constraint:
        """`constraint` with its grammar compiled for this vocabulary. For each such request, on a thread of `Patience`.

        Raises BadRequest: it cannot be compiled, or allows nothing at all. Raises NotSupported: see `make_vocabulary`.
        """
        return replace(constraint, compiled=self._matcher(constraint))

    def processor(self, constraint: Constraint, generated: Sequence[int] = ()) -> GrammarProcessor:
        """For one row that has generated these tokens already. Model thread. Raises what `prepare` raises."""
        compiled = constraint.compiled
        matcher = self._matcher(constraint) if compiled is None else compiled.deep_copy()
        return GrammarProcessor(matcher, constraint, self._eos, self.make_vocabulary(), generated)

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        """A copy for one row. A new grammar takes up to many seconds: on a thread of `Patience`; only a follower of
        several ranks compiles on the model thread. Raises BadRequest, NotSupported: see `prepare`."""
        grammar = constraint.grammar
        found = self._compiled.get(grammar)
        if found is not None:
            return found.deep_copy()
        vocabulary = self.make_vocabulary()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            # The first mask is the dearest and can show what compiling did not.
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, vocabulary.vocab_size))
        if matcher.is_error():
            raise BadRequest(
                f"{constraint.param}: no answer can be held to this: {_first_line(matcher)}", param=constraint.param
            )
        self._compiled.put(grammar, matcher)
        return matcher.deep_copy()


class GrammarProcessor(Remembering):
    """Keeps one row to its grammar. Model thread only.

    `error` is set when the matcher gives up (a limit, a bug); the row is then forced to end. Look at it before
    reporting a token: what was generated up to there is not a complete answer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        constraint: Constraint,
        eos: tuple[int, ...],
        tokenizer: LLTokenizer,
        generated: Sequence[int] = (),
    ) -> None:
        self.error: StartLLMError | None = None
        self._matcher = matcher
        self._eos = eos
        self._after = constraint.after
        self._opens = constraint.opens
        self._waiting = constraint.wait and bool(constraint.after)
        self._recent: tuple[int, ...] = ()
        self._started = False
        self._tokenizer = tokenizer
        self._bits = allocate_token_bitmask(1, tokenizer.vocab_size)
        for token in generated:
            self._advance(token)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Masks `logits` [1, vocab]. Waits for the newest of `tokens`; at the first call that is known already."""
        if self._started:
            newest = tokens if tokens.size == 1 else tokens[-1:]
            # Queued before the forward pass, so that reading it does not wait for that.
            mx.async_eval(newest)  # type: ignore[no-untyped-call]
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
            self._advance(cast(int, newest.item()))
        self._started = True
        allowed = mx.array(self._allowed(logits.shape[-1]))
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def save(self) -> Any:
        return self.__dict__ | {"_matcher": self._matcher.deep_copy()}

    def allowed(self, newest: int, draft: Sequence[int]) -> int:
        """How many tokens of a draft behind `newest`, which has not been here yet, the grammar lets pass.

        A draft is cut where the grammar begins or ends, too.
        """
        if self.error is not None:
            return 0
        if self._waiting or newest in self._opens:
            ends = self._after[-1:]
            if newest in ends:
                return 0
            return next((i for i, token in enumerate(draft) if token in ends or token in self._eos), len(draft))
        if self._matcher.is_stopped():
            return 0
        passed: int = self._matcher.validate_tokens([newest, *draft])
        return max(0, passed - 1)

    def forced(self, newest: int) -> list[int]:
        """The tokens that must follow `newest`, which has not been here yet, as far as they are sure."""
        if self.error is not None or self._waiting or newest in self._opens or self._matcher.is_stopped():
            return []
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(newest):
            return []
        tokens, _ = self._tokenizer.tokenize_partial(matcher.compute_ff_bytes())
        return list(tokens)

    def _advance(self, token: int) -> None:
        """The row has drawn this token. What the grammar does not take sets `error`."""
        if self.error is not None:
            return
        if not self._waiting and token in self._opens:
            self._waiting = True
        if self._waiting:
            self._recent = (*self._recent, token)[-len(self._after) :]
            self._waiting = self._recent != self._after
        elif not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self._fail()
        self._opens = ()

    def _allowed(self, vocab: int) -> NDArray[np.bool_]:
        """Which of the `vocab` columns of the logits may come next. While reasoning is open: all but the ends, also
        columns beyond the tokenizer's vocabulary. `_opens` only as the first token."""
        if self._waiting:  # reasoning is free, but an answer must follow
            allowed = np.ones(vocab, dtype=np.bool_)
            allowed[list(self._eos)] = False
            return allowed
        allowed = np.zeros(vocab, dtype=np.bool_)
        if self.error is None and not self._matcher.is_stopped():
            fill_next_token_bitmask(self._matcher, self._bits)
            bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[:vocab]
            allowed[: len(bits)] = bits
            allowed[list(self._opens)] = True
            if self._matcher.is_error() or not allowed.any():
                self._fail()
                allowed[:] = False
        if self.error is not None or self._matcher.is_stopped():
            allowed[list(self._eos)] = True
        return allowed

    def _fail(self) -> None:
        reason = _first_line(self._matcher) or "no token may follow"
        # No fault of the server's: the same request would end here again.
        self.error = NotSupported(f"The grammar of this request could not be followed any further: {reason}.")


def _vocabulary_of(tokenizer: Any, eos: tuple[int, ...]) -> LLTokenizer | NotSupported:
    """Seconds for many tokens. An error is returned, not raised: it is kept, and raised to each who asks."""
    refused = "Structured output is not supported for this model's tokenizer"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return NotSupported(f"{refused}: it is not a fast one.")
    if backend.padding is not None or backend.truncation is not None:  # the vocabulary alone is wanted
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
    try:
        # In two calls, between which other threads run: each holds Python's lock, for seconds if there are many tokens.
        made = LLTokenizer(backend.to_str(), eos_token=list(eos), slices=[])
        return made.with_slices(LLTokenizer.general_slices())
    except ValueError as error:
        return NotSupported(f"{refused}: {error}")
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # llguidance's, which is no `Exception`, and would end a thread
            raise
        return NotSupported(f"{refused}: llguidance gave up ({error}).")


def _first_line(matcher: LLMatcher) -> str:
    text: str = matcher.get_error()
    return text.strip().splitlines()[0] if text.strip() else ""
