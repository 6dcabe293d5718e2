"""The loop of a row that decodes alone: proposals are verified in blocks. Model thread only.

A pass computes the newest token and a draft of what may follow it. Then every position is drawn as if it were alone,
with the row's own processors and sampler, and as much of the draft is taken as equals what was drawn. So what is said
does not depend on drafts, at any temperature; only how many passes it takes does.

A token is reported when it has gone through the model, as `BatchGenerator` does it: the KV holds what was reported.
Where no draft can follow, a pass is started before the last one's token is read, so that the device need not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

import mlx.core as mx
import numpy as np

from start_llm.engine.decode.costs import MOST_DRAFTED, MOST_WIDE, DraftGate
from start_llm.engine.decode.draft import FORCED_MATCH, Counts, Drafter, Proposal
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.runner import Cache, DecodeRow

Sampler = Callable[[Any], Any]
Processor = Callable[[Any, Any], Any]

_PAUSE = 0.005


@runtime_checkable
class Stateful(Protocol):
    """A sampler or processor that remembers; all others give the same for the same input."""

    def save(self) -> Any:
        """Its state; later calls do not change what was returned."""
        ...

    def restore(self, state: Any) -> None: ...


@runtime_checkable
class Guide(Protocol):
    """A processor that knows what may follow before it is computed. `newest` has not gone through it yet."""

    def allowed(self, newest: int, draft: Sequence[int]) -> int:
        """How many tokens of the draft may follow."""
        ...

    def forced(self, newest: int) -> list[int]:
        """Tokens that must follow."""
        ...


@dataclass(slots=True)
class RowState:
    """A row between two steps, as another loop can go on with it.

    Attributes:
        tokens: what lies in the KV.
        newest: a token id, or an array of one: drawn, and not in the KV yet.
        left: tokens that may still be reported, `newest` included.
        fresh: `newest` ends the prompt, so it is not reported.
        sampler, processors: what draws the row's tokens, or a wrapper with it as `inner`. Processors look at the
            newest token only.
    """

    cache: Cache
    tokens: list[int]
    newest: Any
    left: int
    sampler: Sampler
    processors: Sequence[Processor] = ()
    fresh: bool = True
    counts: Counts = field(default_factory=Counts)


class SingleRow:
    """
    Args:
        model: `model(tokens [1, n], cache=...)` gives logits ``[1, n, vocab]``.
        state: taken over.
        gate: where it is missing, nothing is drafted.
        quantise: is called with the cache after each pass.
        quantised_from: so many tokens in the KV `quantise` waits for; a block does not reach beyond them.
    """

    def __init__(
        self,
        uid: int,
        model: Any,
        state: RowState,
        *,
        eos: frozenset[int],
        gate: DraftGate | None = None,
        quantise: Callable[[Cache], object] | None = None,
        quantised_from: int = 0,
    ) -> None:
        self.uid, self.state = uid, state
        self._model, self._eos = model, eos
        self._quantise, self._quantised_from = quantise, quantised_from
        parts: list[Any] = [getattr(part, "inner", part) for part in (*state.processors, state.sampler)]
        self._stateful: list[Stateful] = [part for part in parts if isinstance(part, Stateful)]
        self._guide: Guide | None = next((part for part in parts if isinstance(part, Guide)), None)
        self._rewinder = Rewinder(state.cache)
        self._gate = gate if self._rewinder.possible else None
        self._drafter: Drafter | None = None
        self._watch = _Watch(gate)
        self._carried: list[int] = []  # reported, and to be computed again with the next pass
        self._expected: Proposal | None = None
        self._ahead = False
        if not isinstance(state.newest, mx.array):
            state.newest = mx.array([state.newest])

    def offer(self, drafter: Drafter) -> None:
        """From now on it proposes; it may have missed what was said."""
        if self._gate is not None and self._drafter is not drafter:
            self._drafter = drafter
            tokens = self.state.tokens
            drafter.append(tokens[drafter.known :] + self._carried[max(0, drafter.known - len(tokens)) :])

    def step(self) -> list[DecodeRow]:
        """One pass. Returns the tokens that went through the model with it; none for the end of the prompt."""
        self._watch.enter()
        rows = self._start() if self.state.fresh else self._run_ahead() if self._ahead else self._run()
        self._watch.leave()
        return rows

    def leave(self) -> RowState:
        """Ends the loop: what was reported is in the KV."""
        if self._carried:
            self._forward(mx.array(self._carried))
            self._commit()
        return self.state

    # --- the kinds of steps ---------------------------------------------------

    def _start(self) -> list[DecodeRow]:
        fed = self.state.newest
        self._plain(fed)
        self.state.fresh = False
        self._commit(cast(int, fed.item()))
        return []

    def _run_ahead(self) -> list[DecodeRow]:
        """Starts the next pass, then reads the token that it began with."""
        fed = self.state.newest
        self._plain(fed)
        token = self._read(fed)
        self._commit(token)
        return self._report([token])

    def _run(self) -> list[DecodeRow]:
        token = self._read(self.state.newest)
        draft = self._draft(token)
        if draft:
            return self._report(self._block(token, draft))
        self._plain(mx.array([*self._carried, token]))
        self._commit(token)
        return self._report([token])

    def _plain(self, fed: mx.array) -> None:
        """A pass without a draft; what it draws is not waited for."""
        state = self.state
        logits = self._forward(fed)[:, -1, :]
        for processor in state.processors:
            logits = processor(fed[-1:], logits)
        state.newest = state.sampler(_normalised(logits))
        mx.async_eval(state.newest)  # type: ignore[no-untyped-call]

    def _block(self, token: int, draft: list[int]) -> list[int]:
        """Verifies a draft. Returns what was said: the token and what is right of the draft."""
        state, carried = self.state, self._carried
        fed = [*carried, token, *draft]
        mark = self._rewinder.mark()
        logits = self._forward(mx.array(fed))[0, len(carried) :, :]
        drawn, states = self._draw([token, *draft], logits)
        right = next((i for i, (a, b) in enumerate(zip(draft, drawn, strict=False)) if a != b), len(draft))
        self._watch.result(len(state.tokens))
        if right < len(draft) and states:
            for part, saved in zip(self._stateful, states[right], strict=True):
                part.restore(saved)
        self._learn(draft, right)
        said = [token, *draft[:right]]
        if right == len(draft):
            self._commit(*said)
        elif self._rewinder.carries:
            self._rewinder.restore(mark, len(fed))
            self._carried = [*carried, *said]
        else:
            self._rewinder.cut(len(draft) - right)
            self._commit(*said)
        state.newest = mx.array([drawn[right]])
        self._ahead, self._expected = False, None
        return said

    def _forward(self, fed: mx.array) -> mx.array:
        self.state.counts.forwards += not self.state.fresh  # that pass belongs to the prompt
        self._watch.launch(fed.size)
        logits: mx.array = self._model(fed[None], cache=self.state.cache)
        return logits

    def _commit(self, *said: int) -> None:
        """These, and what was carried, are in the KV for good."""
        self.state.tokens += [*self._carried, *said]
        self._carried = []
        if self._quantise is not None:
            self._quantise(self.state.cache)
        self._look_ahead()

    def _report(self, tokens: list[int]) -> list[DecodeRow]:
        state, rows = self.state, list[DecodeRow]()
        finish: Literal["stop", "length"] | None = None
        for token in tokens:
            state.left -= 1
            finish = "stop" if token in self._eos else "length" if state.left == 0 else None
            rows.append(DecodeRow(self.uid, token, finish=finish))
        if finish is not None:
            self.leave()
            mx.eval([layer.state for layer in state.cache])
            rows[-1].cache, rows[-1].tokens = state.cache, state.tokens
        return rows

    # --- drawing ----------------------------------------------------------------

    def _read(self, drawn: mx.array) -> int:
        token = cast(int, drawn.item())
        self._watch.result(len(self.state.tokens))
        if self._expected is not None and self._gate is not None:
            self._gate.acceptance.observe(self._expected.match, self._expected.tokens[0] == token)
            self._expected = None
        if self._drafter is not None:
            self._drafter.append([token])
        return token

    def _draw(self, newest: Sequence[int], logits: mx.array) -> tuple[list[int], list[list[Any]]]:
        """Draws every position of a block, as if each draft token were right.

        Returns:
            The tokens, and for each position but the first the state of `_stateful` before it was drawn.
        """
        sampler, processors = self.state.sampler, self.state.processors
        if processors:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        states, drawn = list[list[Any]](), list[mx.array]()
        alike = not isinstance(getattr(sampler, "inner", sampler), Stateful)
        if alike and not processors:
            return _ints([sampler(_normalised(logits))]), states
        for i, token in enumerate(newest):
            if i:
                states.append([part.save() for part in self._stateful])
            row = logits[i : i + 1]
            for processor in processors:
                row = processor(mx.array([token]), row)
            drawn.append(row if alike else sampler(_normalised(row)))
        return _ints([sampler(_normalised(mx.concatenate(drawn)))] if alike else drawn), states

    # --- drafting ---------------------------------------------------------------

    def _draft(self, token: int) -> list[int]:
        """What to verify behind this token, the newest one; empty if nothing pays."""
        most = self._room()
        if self._gate is None or token in self._eos or most < 1:
            return []
        proposal = self._drafter.propose(most) if self._drafter is not None else None
        forced = self._guide.forced(token)[:most] if self._guide is not None else []
        if forced and (proposal is None or proposal.tokens[: len(forced)] != forced):
            proposal = Proposal(forced, FORCED_MATCH)
        self._expected = proposal
        if proposal is None:
            return []
        length = self._gate.length(
            proposal.match, len(proposal.tokens), carried=len(self._carried), context=len(self.state.tokens)
        )
        draft = proposal.tokens[:length]
        end = next((i for i, drafted in enumerate(draft) if drafted in self._eos), None)
        draft = draft if end is None else draft[: end + 1]
        if draft and self._guide is not None:
            draft = draft[: self._guide.allowed(token, draft)]
        return draft

    def _room(self) -> int:
        """The most tokens that a draft may have."""
        width = len(self._carried) + 1
        most = min(self.state.left - 1, MOST_DRAFTED, MOST_WIDE - width)
        held = len(self.state.tokens)
        return min(most, self._quantised_from - held - width) if held < self._quantised_from else most

    def _learn(self, draft: list[int], right: int) -> None:
        counts = self.state.counts
        counts.drafted += len(draft)
        counts.accepted += right
        if self._gate is not None and self._expected is not None:
            for i in range(min(right + 1, len(draft))):
                self._gate.acceptance.observe(self._expected.match + i, i < right)
        self._expected = None
        if self._drafter is not None:
            self._drafter.append(draft[:right])

    def _look_ahead(self) -> None:
        """Decides whether the next pass may start before it is known what it begins with."""
        self._ahead = True
        if self._gate is None or self.state.left < 2:
            return
        if self._guide is not None:
            self._ahead = False
        elif self._drafter is not None:
            self._ahead = not self._gate.hopeful(self._drafter.outlook(), context=len(self.state.tokens))
            self._expected = self._drafter.propose(1) if self._ahead else None


class _Watch:
    """Tells the gate how long passes take: from when a pass could start to when its result was there."""

    def __init__(self, gate: DraftGate | None) -> None:
        self._gate = gate
        self._flying: deque[tuple[float, int]] = deque()
        self._last = self._left = 0.0
        self._disturbed = False

    def enter(self) -> None:
        """Another step begins; if somebody else used the device in between, the next time says nothing."""
        now = time.perf_counter()
        self._disturbed = now - self._left > _PAUSE

    def leave(self) -> None:
        self._left = time.perf_counter()

    def launch(self, width: int) -> None:
        self._flying.append((time.perf_counter(), width))

    def result(self, held: int) -> None:
        if not self._flying:
            return
        now = time.perf_counter()
        started, width = self._flying.popleft()
        if self._gate is not None and not (self._disturbed and started < self._left):
            self._gate.costs.observe(width, held, now - max(started, self._last))
        self._last = now


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _ints(arrays: list[mx.array]) -> list[int]:
    return [int(value) for value in np.array(mx.concatenate([mx.reshape(a, (-1,)) for a in arrays]))]
