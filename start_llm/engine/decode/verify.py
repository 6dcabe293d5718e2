"""The loop of a row that decodes alone: drafts are verified in blocks. Model thread only.

Theory of operation. A row is in one of three states between two passes, and each pass leads to the next one:

    state   what is known                                   the next pass                            then
    Start   the prompt's last token                         over that token; nothing is reported     Plain or Block
    Plain   nothing: the newest token is being drawn        begins before that token is read         Plain or Block
    Block   the newest token, once the device has drawn it  over it and a draft, if one pays; else   Plain or Block
                                                            over it alone

`Plain` keeps the device busy: the next pass is started before the last one's token is read. It is chosen where no draft
can follow. Only where one may follow (`DraftGate.hopeful`), or a grammar must see each token first, the loop waits for
the token: `Block`. Behind a block with a wrong token the row is always in `Block`.

In a block every position is drawn as if it were alone, with the row's own processors and sampler, and as much of the
draft is taken as equals what was drawn. So what is said does not depend on drafts, at any temperature; only how many
passes it takes does. Layers that can be cut drop what was wrong. Others take the whole pass back, and the tokens that
were right are *carried*: reported already, and computed again with the next pass.

A draft comes from the row's text, from its grammar where that leaves no choice, or from a head; the gate says which one
is worth a wider pass. A token is reported when it has gone through the model, as `BatchGenerator` does it: the KV holds
what was reported, less what is carried.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import mlx.core as mx
import numpy as np

from start_llm.engine.decode.constraint import GrammarProcessor
from start_llm.engine.decode.draft import FORCED_MATCH, HEAD_MATCH, LEAST_MATCH, Proposal, SuffixIndex
from start_llm.engine.decode.gate import MOST_DRAFTED, MOST_HEADED, MOST_WIDE, DraftGate, DraftOption
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.row import DecodeRow, Remembering, RowState
from start_llm.kvcache.layers import make_room

if TYPE_CHECKING:  # takes seconds to import, and few need it
    from start_llm.engine.decode.quantised import Quantisation

PAUSE = 0.005  # seconds; a longer one between two passes may mean that somebody else used the device
_NEAR = 16  # tokens: of two landmarks that end alike and stand so near to each other one is enough
_MOST_STATES = 4  # that a row keeps


@dataclass(frozen=True, slots=True)
class _NextPass:
    waits: bool = True  # for the newest token: the state is `Block`, else `Plain`
    carried: tuple[int, ...] = ()  # tokens that were reported and must be computed again
    guess: Proposal | None = None  # of the token that is being drawn; what is right of it is learnt when it is read
    outlook: int = 0  # the longest match that that token could end, where that is known
    ahead: mx.array | None = None  # the hidden states behind the carried tokens, for a head


class SingleRow:
    """
    Args:
        model: `model(tokens [1, n], cache=...)` gives logits ``[1, n, vocab]``.
        state: taken over.
        gate: where it is missing, nothing is drafted.
        quantisation: a block does not reach beyond its `start`.
        landmarks: tokens behind which layers that cannot be cut leave their state (`RowState.states`): clients often
            part from an answer there.

    Attributes:
        text: knows the row's text, once it is there: what stands behind the same words elsewhere is a draft.
    """

    def __init__(
        self,
        uid: int,
        model: Any,
        state: RowState,
        *,
        eos: frozenset[int],
        gate: DraftGate | None = None,
        quantisation: Quantisation | None = None,
        landmarks: frozenset[int] = frozenset(),
    ) -> None:
        self.uid, self.state = uid, state
        self._model, self._eos, self._quantisation = model, eos, quantisation
        self._stateful, self._guide = stateful_parts(state), grammar_of(state)
        self._rewinder = Rewinder(state.cache)
        self._gate = gate if self._rewinder.possible else None
        self._head = model if isinstance(model, HeadedModel) and gate is not None and gate.head is not None else None
        keeps = self._rewinder.possible and self._rewinder.carries
        self._landmarks = landmarks if keeps else frozenset()
        self._ends = eos | self._landmarks  # tokens that end a draft
        self._timer = _PassTimer(self._gate)
        self.text: SuffixIndex | None = None
        self._next = _NextPass()  # while the state is `fresh`: `Start`
        if not isinstance(state.newest, mx.array):
            state.newest = mx.array([state.newest])

    def offer(self, drafter: SuffixIndex) -> None:
        """From now on it proposes; it may have missed what was said."""
        if self._gate is not None:
            self.text = drafter
            drafter.append([*self.state.tokens, *self._next.carried][drafter.known :])
            if not self.state.fresh and not self._next.waits:
                self._next = self._next_pass()

    def step(self) -> list[DecodeRow]:
        """One pass. Returns the tokens that went through the model with it; none for the end of the prompt."""
        self._timer.enter()
        if self.state.fresh:
            rows = self._start()
        elif self._next.waits:
            rows = self._block(self._next)
        else:
            rows = self._plain(self._next)
        self._timer.leave()
        return rows

    def leave(self) -> RowState:
        """Ends the loop: what was reported is in the KV."""
        if self._next.carried:
            self._forward(mx.array(self._next.carried))
            self._commit(self._next.carried)
        return self.state

    # --- the passes, by state ---------------------------------------------------

    def _start(self) -> list[DecodeRow]:
        """Feeds the prompt's last token and begins to draw the answer's first one. Nothing is reported."""
        fed = self.state.newest
        self._draw_next(fed)
        self.state.fresh = False
        self._commit([cast(int, fed.item())])
        return []

    def _plain(self, now: _NextPass) -> list[DecodeRow]:
        """Begins the next pass, then waits for the token that it feeds, and reports that."""
        fed = self.state.newest
        self._draw_next(fed)
        token = self._read(fed, now)
        self._commit([token])
        return self._report([token])

    def _block(self, now: _NextPass) -> list[DecodeRow]:
        """Waits for the newest token, and feeds it with a draft, if one pays. Reports it and what was right."""
        token = self._read(self.state.newest, now)
        draft = self._draft(token, now.carried, now.ahead)
        if draft is not None:
            return self._report(self._verify(now.carried, token, draft))
        self._draw_next(mx.array([*now.carried, token]))
        self._commit([*now.carried, token])
        return self._report([token])

    def _verify(self, carried: tuple[int, ...], token: int, proposal: Proposal) -> list[int]:
        """A pass over a draft. Returns what was said: the token and what is right of the draft."""
        state, draft = self.state, proposal.tokens
        fed = [*carried, token, *draft]
        before = self._rewinder.save()
        logits = self._forward(mx.array(fed))[0, len(carried) :, :]
        drawn, saved = draw_block(state, self._stateful, [token, *draft], logits)
        self._timer.result(len(state.tokens))
        right = accepted(draft, drawn, self._stateful, saved)
        assert self._gate is not None
        self._gate.learn(state.drafts.counts, proposal, len(draft), right)
        if self.text is not None:
            self.text.append(draft[:right])
        said = [token, *draft[:right]]
        if right < len(draft) and self._rewinder.carries:
            again = (*carried, *said)
            ahead = None if self._head is None else self._head.ahead(state.cache, len(again))
            self._rewinder.restore(before, len(fed))
            self._next = _NextPass(carried=again, ahead=ahead)
        else:
            if right < len(draft):
                self._rewinder.cut(len(draft) - right)
            self._commit([*carried, *said])
            self._next = _NextPass()
        state.newest = mx.array([drawn[right]])
        return said

    def _draw_next(self, fed: mx.array) -> None:
        """A pass without a draft; what it draws is not waited for."""
        state = self.state
        logits = self._forward(fed)[:, -1, :]
        for processor in state.processors:
            logits = processor(fed[-1:], logits)
        state.newest = state.sampler(_normalised(logits))
        mx.async_eval(state.newest)  # type: ignore[no-untyped-call]

    def _forward(self, fed: mx.array) -> mx.array:
        """Logits [1, tokens, vocab] behind `fed`, not evaluated yet. Makes room in the KV, which takes the tokens."""
        self.state.drafts.counts.forwards += not self.state.fresh  # that pass belongs to the prompt
        make_room(self.state.cache, fed.size)
        began = self._timer.clock()
        logits: mx.array = self._model(fed[None], cache=self.state.cache)
        self._timer.launched(began, fed.size)
        return logits

    def _commit(self, tokens: Sequence[int]) -> None:
        """These are in the KV for good. Chooses the next state."""
        self.state.tokens += tokens
        if self.state.tokens[-1] in self._landmarks:
            self._keep_states()
        if self._quantisation is not None:
            self._quantisation.apply(self.state.cache)
        self._next = self._next_pass()

    def _keep_states(self) -> None:
        """Keeps the layers that cannot be cut as they are here, at a landmark: a later checkpoint."""
        kept, tokens, here = self.state.states, self.state.tokens, len(self.state.tokens)
        alike = (length for length, _ in kept if tokens[length - 1] == tokens[-1])
        if len(kept) == _MOST_STATES or any(here - length < _NEAR for length in alike):
            return
        if (layers := self._rewinder.states()) is not None:
            kept.append((here, layers))

    def _next_pass(self) -> _NextPass:
        """Of a pass that is in the KV: may the next one start before it is known what it begins with?"""
        if self._gate is None or self.state.left < 2:
            return _NextPass(waits=False)
        text = self.text
        guess = text.propose(1) if text is not None else None
        if self._guide is not None:
            return _NextPass(guess=guess)
        outlook = 0 if text is None else text.outlook()
        return _NextPass(self._gate.hopeful(outlook, context=len(self.state.tokens)), guess=guess, outlook=outlook)

    def _report(self, tokens: list[int]) -> list[DecodeRow]:
        """Of tokens that went through the model. If the answer ends with them, the last one takes the KV along."""
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

    # --- drafts -----------------------------------------------------------------

    def _draft(self, token: int, carried: Sequence[int], ahead: mx.array | None) -> Proposal | None:
        """What to verify behind this token, the newest one; ``None`` if nothing pays.

        `carried`: tokens that the pass computes before this one. `ahead`: the hidden states behind these, for a head.
        """
        most = self._longest(len(carried))
        if self._gate is None or token in self._ends or most < 1:
            return None
        proposals = [] if (read := self._from_text(token, most)) is None else [read]
        if self._head is not None:
            proposals.append(Proposal([], HEAD_MATCH))  # it is asked only if it is chosen
        if not proposals:
            return None
        options = [DraftOption(one.match, len(one.tokens) or min(most, MOST_HEADED)) for one in proposals]
        index, length = self._gate.choose(options, carried=len(carried), context=len(self.state.tokens))
        chosen = proposals[index]
        draft = chosen.tokens[:length]
        if self._head is not None and length and chosen.match == HEAD_MATCH:
            began = self._timer.clock()
            draft = self._head.propose(self.state.cache, [*carried, token], ahead, length, self.state.sampler)
            self._gate.proposed(length, self._timer.clock() - began)
        draft = self._cut(token, draft)
        return Proposal(draft, chosen.match) if draft else None

    def _cut(self, token: int, draft: list[int]) -> list[int]:
        """A draft ends where the answer may end, where a state is to be kept, and where the grammar forbids it."""
        end = next((i for i, drafted in enumerate(draft) if drafted in self._ends), len(draft))
        draft = draft[: end + 1]
        return draft[: self._guide.allowed(token, draft)] if self._guide is not None and draft else draft

    def _longest(self, carried: int) -> int:
        """The most tokens that a draft may have."""
        width = carried + 1
        most = min(self.state.left - 1, MOST_DRAFTED, MOST_WIDE - width)
        before = 0 if self._quantisation is None else self._quantisation.start - len(self.state.tokens)
        return min(most, before - width) if before > 0 else most

    def _from_text(self, token: int, most: int) -> Proposal | None:
        """What follows `token`, which the index has already: as elsewhere, or as a grammar leaves no choice."""
        proposal = self.text.propose(most) if self.text is not None else None
        forced = self._guide.forced(token)[:most] if self._guide is not None else []
        if forced and (proposal is None or proposal.tokens[: len(forced)] != forced):
            return Proposal(forced, FORCED_MATCH)
        return proposal

    # --- drawing ----------------------------------------------------------------

    def _read(self, drawn: mx.array, now: _NextPass) -> int:
        """Waits for a token that was drawn; the gate learns whether it was guessed, the index gets it."""
        token, text = cast(int, drawn.item()), self.text
        self._timer.result(len(self.state.tokens))
        if self._gate is None or text is None:
            return token
        if now.guess is not None:
            self._gate.acceptance.observe(now.guess.match, now.guess.tokens[0] == token)
        text.append([token])
        if now.outlook == LEAST_MATCH:
            self._gate.acceptance.observe(LEAST_MATCH - 1, text.propose(1) is not None)
        return token


class _PassTimer:
    """Tells the gate how long passes take: from when a pass could start to when its result was there.

    A pass takes at least as long as it took to launch it.
    """

    def __init__(self, gate: DraftGate | None) -> None:
        self._gate, self.clock = gate, time.perf_counter if gate is None else gate.clock
        self._launched: deque[tuple[float, int, float]] = deque()  # began, width, seconds to launch it
        self._last_result = self._left_at = 0.0
        self._disturbed = False

    def enter(self) -> None:
        """Another step begins; if somebody else used the device in between, the next time says nothing."""
        self._disturbed = self.clock() - self._left_at > PAUSE

    def leave(self) -> None:
        self._left_at = self.clock()

    def launched(self, began: float, width: int) -> None:
        self._launched.append((began, width, self.clock() - began))

    def result(self, held: int) -> None:
        """The oldest pass has its result: its seconds go to the gate. `held`: tokens in the KV."""
        if not self._launched:
            return
        now = self.clock()
        started, width, least = self._launched.popleft()
        if self._gate is not None and not (self._disturbed and started < self._left_at):
            self._gate.observe(width, held, max(least, now - max(started, self._last_result)))
        self._last_result = now


def grammar_of(state: RowState) -> GrammarProcessor | None:
    parts = (getattr(part, "inner", part) for part in state.processors)
    return next((part for part in parts if isinstance(part, GrammarProcessor)), None)


def stateful_parts(state: RowState) -> list[Remembering]:
    """What a rejected draft has to put back."""
    parts: list[Any] = [getattr(part, "inner", part) for part in (*state.processors, state.sampler)]
    return [part for part in parts if isinstance(part, Remembering)]


def draw_block(
    state: RowState, stateful: Sequence[Remembering], newest: Sequence[int], logits: mx.array
) -> tuple[list[int], list[list[Any]]]:
    """Draws every position of a block, as if each draft token were right.

    Args:
        newest: the block's tokens.
        logits: behind each of them.

    Returns:
        The tokens, and for each position but the first the state of `stateful` before it was drawn.
    """
    sampler, processors = state.sampler, state.processors
    if processors:
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
    states, drawn = list[list[Any]](), list[mx.array]()
    alike = not isinstance(getattr(sampler, "inner", sampler), Remembering)
    if alike and not processors:
        return _ints([sampler(_normalised(logits))]), states
    for i, token in enumerate(newest):
        if i:
            states.append([part.save() for part in stateful])
        row = logits[i : i + 1]
        for processor in processors:
            row = processor(mx.array([token]), row)
        drawn.append(row if alike else sampler(_normalised(row)))
    return _ints([sampler(_normalised(mx.concatenate(drawn)))] if alike else drawn), states


def accepted(
    draft: Sequence[int], drawn: Sequence[int], stateful: Sequence[Remembering], states: Sequence[Sequence[Any]]
) -> int:
    """How many tokens of a draft are right. `stateful` is put back to where the first wrong one was drawn."""
    right = next((i for i, (a, b) in enumerate(zip(draft, drawn, strict=False)) if a != b), len(draft))
    if right < len(draft) and states:
        for part, before in zip(stateful, states[right], strict=True):
            part.restore(before)
    return right


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _ints(arrays: list[mx.array]) -> list[int]:
    return [int(value) for value in np.array(mx.concatenate([mx.reshape(a, (-1,)) for a in arrays]))]
