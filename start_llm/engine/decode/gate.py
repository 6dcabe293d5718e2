"""Whether a draft pays, and how long it should be. Pure; model thread only.

A draft is as long as is expected to gain most: right tokens for the seconds that its pass takes. Passes are what their
costs (`costs`) say, right tokens what the conversation's own acceptance (`draft`) says.

A gate that says no would never see a wide pass again. So it tries a longer draft now and then, where that would pay if
wide passes cost no more than narrow ones. Tries take under a hundredth of the time, however wrong the costs are. Nor
does the gate go on with wide passes only: a narrow one now and then tells what they are compared with, and at once
where wide ones have changed.

Where several sources have something to propose (a copy, a grammar, a head), that one is taken which gains most. Behind
a copy that ends, or behind what a grammar leaves no choice about, a head may go on in the same draft. The time that a
head takes to propose counts.

A loop that waits for each token before it launches the next pass leaves the device without work meanwhile. So it waits
only where a draft is likely enough (`hopeful`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from start_llm.engine.decode.costs import MOST_DRAFTED, MOST_WIDE, PassCosts
from start_llm.engine.decode.draft import HEAD_MATCH, LEAST_MATCH, Acceptance

LEAST_GAIN = 1.05
TRIED_SHARE = 0.008  # of the seconds that decoding takes: what passes may take that are only tried
_FIRST_TRY = 250  # narrow passes before it
_TRIED_LENGTHS = (7, 31, 15)
_WIDE_AT_MOST = 128  # passes in a row that may be wide: what a narrow one takes has to be known, too
_NEWEST = 0.05  # weight of one launch in what launches take
_AT_ONCE = 16  # narrow passes that are learnt from together, if nothing is decided before: that takes less time
_HOPELESS = 0.02  # a token that is right less often ends a draft
MOST_HEADED = 8  # tokens that a head proposes at once; the further it goes the less it knows


@dataclass(frozen=True, slots=True)
class DraftOption:
    """What one source proposes. `match`: what `Acceptance` knows it by. `most`: tokens."""

    match: int
    most: int
    continued: int = 0  # tokens that a head may propose behind all of these
    read: int = 0  # steps that the head takes before that, over these tokens

    @property
    def is_head(self) -> bool:
        return self.match >= HEAD_MATCH

    def match_of(self, index: int) -> int:
        """What `Acceptance` knows the token at `index` by."""
        return index + (HEAD_MATCH if index >= self.most else self.match)

    def head_steps(self, tokens: int) -> int:
        """That a head takes for a draft of so many tokens."""
        if self.is_head:
            return tokens
        return self.read + tokens - self.most if tokens > self.most else 0


class DraftGate:
    """`carries`: after a rejection the accepted tokens have to be computed again, with the next pass.

    `head`: seconds that the model's head takes to propose so many tokens (the width); ``None``: it has no head.
    `acceptance`: of all conversations. `clock`: seconds, by which passes are measured.
    """

    def __init__(
        self,
        costs: PassCosts,
        carries: bool = False,
        head: PassCosts | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.costs, self.carries, self.head = costs, carries, head
        self.clock = clock or (lambda: time.perf_counter())
        self.acceptance, self._unknown = Acceptance(), Acceptance()
        self._seconds = self._seconds_tried = self._narrow = 0.0
        self._tries, self._is_trying = 0, False
        self._wide = _WIDE_AT_MOST  # passes in a row
        self._launching = 0.0  # seconds that the launch of a pass takes, usually
        self._observed: list[tuple[int, int, float, float]] = []  # passes that nothing was learnt from yet

    def length(self, acceptance: Acceptance, match: int, most: int, *, carried: int, context: int) -> int:
        """Tokens to draft; 0 if none pays.

        Args:
            acceptance: of the row's conversation.
            most: tokens that are proposed.
            carried: tokens that must be computed before them anyway, beside the newest one.
            context: tokens in the KV.
        """
        return self.choose(acceptance, [DraftOption(match, most)], carried=carried, context=context)[1]

    def choose(
        self, acceptance: Acceptance, options: Sequence[DraftOption], *, carried: int, context: int
    ) -> tuple[int, int]:
        """Which of the options to take, one at least, and how many tokens of it; 0 if none pays. See `length`."""
        self._learn_observed()
        self._end_try(self._narrow)
        if self._wide >= (1 if self.costs.wants_narrow else _WIDE_AT_MOST):
            self._wide = 0
            return 0, 0
        seconds, head = self.costs.by_width(context), self._head_seconds(context)
        gains = [self._best(acceptance, option, carried, seconds, head) for option in options]
        index = gains.index(max(gains))
        length = gains[index][1]
        if not self._may_try():
            return index, length
        # A head that the gate says no to is never seen again: it is tried as one of which nothing is known.
        flat = [seconds[1]] * len(seconds)
        hopes = [self._best(self._unknown if o.is_head else acceptance, o, carried, flat, None) for o in options]
        tried = index if length else hopes.index(max(hopes))
        longest = hopes[tried][1]
        longer = [tokens for tokens in _TRIED_LENGTHS if tokens > length]
        if longest <= length or not longer:
            return index, length
        self._is_trying = True
        return tried, min(longest, longer[self._tries % len(longer)])

    def hopeful(self, acceptance: Acceptance, outlook: int, *, context: int) -> bool:
        """Whether a head, or a match of at most this length, could be worth a draft, or a try."""
        self._end_try(self._narrow)
        if outlook < LEAST_MATCH and self.head is None:
            return False
        options = [DraftOption(HEAD_MATCH, MOST_HEADED)] if self.head is not None else []
        seconds = self.costs.by_width(context)
        if outlook >= LEAST_MATCH and self._is_worth_waiting(acceptance, outlook, seconds[1]):
            options.append(DraftOption(outlook, MOST_DRAFTED))
        if not options or self._may_try():
            return bool(options)
        head = self._head_seconds(context)
        return any(self._best(acceptance, option, 0, seconds, head)[1] > 0 for option in options)

    def _is_worth_waiting(self, acceptance: Acceptance, outlook: int, narrow: float) -> bool:
        """Whether a match of this length, which the next token may end, is worth that its draft follows at once.

        For that the loop has to wait for the token, and the device for the launch of the next pass. Without the wait
        the draft begins one token later: so what is won is a narrow pass, if there is a match and it goes on. In that
        case the launch would have to be waited for anyway.
        """
        right = acceptance.chance(outlook - 1) * acceptance.chance(outlook)
        # Where a launch takes as long as its pass, the model computes at once, and no device waits.
        return right * narrow > (1 - right) * min(self._launching, narrow - self._launching)

    def together(self, acceptances: Sequence[Acceptance], options: Sequence[DraftOption], *, context: int) -> int:
        """The width of a pass over a block of each row, by which each row's draft is cut; 1: none pays.

        Args:
            acceptances: of each row's conversation.
            options: what each row proposes; a match that is too short is nothing.
            context: tokens in the KV of all rows.
        """
        rows, seconds = len(options), self.costs.by_width(context)
        said, chances = float(rows), [float(option.match >= LEAST_MATCH) for option in options]
        best, best_gain = 1, LEAST_GAIN
        for width in range(2, MOST_WIDE // rows + 1):
            for row, option in enumerate(options):
                more = width - 1 <= option.most
                chances[row] *= acceptances[row].chance(option.match + width - 2) if more else 0.0
            said += sum(chances)
            gain = said / rows * seconds[rows] / seconds[rows * width]
            if gain > best_gain:
                best, best_gain = width, gain
        return best

    def observe(self, width: int, context: int, seconds: float, launching: float = 0.0) -> None:
        """A pass of a row that decodes took so long, and its launch so much of that."""
        self._observed.append((width, context, seconds, launching))
        if width > 1 or len(self._observed) == _AT_ONCE:
            self._learn_observed()

    def _learn_observed(self) -> None:
        for observed in self._observed:
            self._learn(*observed)
        self._observed.clear()

    def _learn(self, width: int, context: int, seconds: float, launching: float) -> None:
        self.costs.observe(width, context, seconds)
        if launching:
            usual = self._launching or launching
            self._launching = usual + _NEWEST * (min(launching, 2 * usual) - usual)
        self._seconds += seconds
        self._wide = 0 if width == 1 else self._wide + 1
        self._narrow = seconds if width == 1 else self._narrow
        if width > 1:
            self._end_try(seconds)

    def _end_try(self, seconds: float) -> None:
        """Of a pass that took so long. Where none was made, or nobody knows what it took, the try counts as if it had
        been a narrow one."""
        if self._is_trying:
            self._is_trying = False
            self._tries += 1
            self._seconds_tried += seconds

    def _may_try(self) -> bool:
        return not self._is_trying and self._seconds_tried < TRIED_SHARE * (self._seconds - _FIRST_TRY * self._narrow)

    def _head_seconds(self, context: int) -> list[float] | None:
        return None if self.head is None else self.head.by_width(context)

    def _best(
        self,
        acceptance: Acceptance,
        option: DraftOption,
        carried: int,
        seconds: list[float],
        head: list[float] | None,
    ) -> tuple[float, int]:
        """The gain of the length that gains most, and that length; 0: none gains enough.

        `seconds`: of passes by their width. `head`: of a head's proposals, by their length.
        """
        base = seconds[carried + 1]
        longest = min(option.most + option.continued, MOST_DRAFTED, MOST_WIDE - carried - 1)
        best, best_gain = 0, LEAST_GAIN
        expected, chance, again = 0.0, 1.0, 0.0
        for drafted in range(1, longest + 1):
            right = acceptance.chance(option.match_of(drafted - 1))
            if self.carries:  # if it fails here, what came before is computed once more
                again += chance * (1 - right) * (seconds[drafted + 1] - seconds[1])
            chance *= right
            expected += chance
            if chance < _HOPELESS:
                break
            steps = option.head_steps(drafted)
            proposing = head[steps] if head is not None and steps else 0.0
            gain = (1 + expected) * base / (seconds[carried + 1 + drafted] + again + proposing)
            if gain > best_gain:
                best, best_gain = drafted, gain
        return best_gain, best
