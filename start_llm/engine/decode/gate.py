"""Whether a draft pays, and how long it should be. Pure; model thread only.

A draft is as long as is expected to gain most: right tokens for the seconds that its pass takes. Passes take what the
table says (`costs`), right tokens are what the conversation's own acceptance (`draft`) says. Of several sources the one
is taken that gains most; the time that a head takes to propose counts.

A gate that says no would never see a wide pass again. So it tries a longer draft now and then, where that would pay if
wide passes cost no more than narrow ones; tries take under a hundredth of the time. And after many wide passes it makes
a narrow one, to refresh what they are compared with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from start_llm.engine.decode.costs import MOST_DRAFTED, MOST_WIDE, PassCosts
from start_llm.engine.decode.draft import HEAD_MATCH, LEAST_MATCH, Acceptance

LEAST_GAIN = 1.05
TRIED_SHARE = 0.008  # of the seconds that decoding takes: what passes may take that are only tried
MOST_HEADED = 8  # tokens that a head proposes at once; the further it goes the less it knows
_FIRST_TRY = 250  # narrow passes before it
_TRIED_LENGTHS = (7, 31, 15)
_WIDE_AT_MOST = 128  # passes in a row
_NEWEST = 0.05  # weight of one launch in what launches take
_HEAD_STEPS = 8  # times of its proposals; the quickest counts, and the first one may have compiled what others use
_HOPELESS = 0.02  # a token that is right less often ends a draft


@dataclass(frozen=True, slots=True)
class DraftOption:
    """What one source proposes. `match`: what `Acceptance` knows it by. `most`: tokens."""

    match: int
    most: int
    continued: int = 0  # tokens that a head may propose behind all of these
    read: int = 0  # steps that the head takes before that, over these tokens

    def match_of(self, index: int) -> int:
        """What `Acceptance` knows the token at `index` by."""
        return index + (HEAD_MATCH if index >= self.most else self.match)

    def head_steps(self, tokens: int) -> int:
        """That a head takes for a draft of so many tokens."""
        if self.match >= HEAD_MATCH:
            return tokens
        return self.read + tokens - self.most if tokens > self.most else 0


class DraftGate:
    """`carries`: after a rejection the accepted tokens have to be computed again, with the next pass.

    `head`: seconds that a step of the model's head takes, 0 while nobody knows; ``None``: it has no head. `acceptance`:
    of all conversations. `clock`: seconds, by which passes are measured.
    """

    def __init__(
        self,
        costs: PassCosts,
        carries: bool = False,
        head: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.costs, self.carries, self.head = costs, carries, head
        self.clock = clock or (lambda: time.perf_counter())
        self.acceptance, self._unknown = Acceptance(), Acceptance()
        self._seconds = self._seconds_tried = self._narrow = 0.0
        self._tries, self._is_trying = 0, False
        self._wide = _WIDE_AT_MOST  # passes in a row
        self._launching = 0.0  # seconds that the launch of a pass takes, usually
        self._head_steps: deque[float] = deque(maxlen=_HEAD_STEPS)

    def choose(
        self, acceptance: Acceptance, options: Sequence[DraftOption], *, carried: int, context: int
    ) -> tuple[int, int]:
        """Which of the options to take, one at least, and how many tokens of it; 0 if none pays.

        Args:
            acceptance: of the row's conversation.
            carried: tokens that must be computed before them anyway, beside the newest one.
            context: tokens in the KV.
        """
        self._end_try()
        if self._wide >= (1 if self.costs.wants_narrow else _WIDE_AT_MOST):
            self._wide = 0
            return 0, 0
        seconds, head_step = self.costs.by_width(context), self.head or 0.0
        gains = [self._best(acceptance, option, carried, seconds, head_step) for option in options]
        index = gains.index(max(gains))
        length = gains[index][1]
        if not self._may_try():
            return index, length
        # A head that the gate says no to is never seen again: it is tried as one of which nothing is known.
        flat = [seconds[1]] * len(seconds)
        known = [self._unknown if option.match >= HEAD_MATCH else acceptance for option in options]
        hopes = [self._best(one, option, carried, flat, 0.0) for one, option in zip(known, options, strict=True)]
        tried = index if length else hopes.index(max(hopes))
        longer = [tokens for tokens in _TRIED_LENGTHS if tokens > length]
        if hopes[tried][1] <= length or not longer:
            return index, length
        self._is_trying = True
        return tried, min(hopes[tried][1], longer[self._tries % len(longer)])

    def hopeful(self, acceptance: Acceptance, outlook: int, *, context: int) -> bool:
        """Whether a head, or a match of at most this length, could be worth a draft, or a try.

        For a draft the loop waits for the newest token before it launches the next pass, and the device meanwhile has
        no work.
        """
        self._end_try()
        if outlook < LEAST_MATCH and self.head is None:
            return False
        options = [DraftOption(HEAD_MATCH, MOST_HEADED)] if self.head is not None else []
        seconds = self.costs.by_width(context)
        if outlook >= LEAST_MATCH and self._is_worth_waiting(acceptance, outlook, seconds[1]):
            options.append(DraftOption(outlook, MOST_DRAFTED))
        if not options or self._may_try():
            return bool(options)
        return any(self._best(acceptance, option, 0, seconds, self.head or 0.0)[1] > 0 for option in options)

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
        self.costs.observe(width, context, seconds)
        if launching:
            usual = self._launching or launching
            self._launching = usual + _NEWEST * (min(launching, 2 * usual) - usual)
        self._seconds += seconds
        if width == 1:
            self._wide, self._narrow = 0, seconds
        else:
            self._wide += 1
            self._end_try(seconds)

    def proposed(self, steps: int, seconds: float) -> None:
        """The head has taken so many steps."""
        self._head_steps.append(seconds / steps)
        if len(self._head_steps) > 1:
            self.head = min(self._head_steps)

    def _end_try(self, seconds: float | None = None) -> None:
        """``None``: no pass was made, or nobody knows what it took; the try counts as a narrow one."""
        if self._is_trying:
            self._is_trying = False
            self._tries += 1
            self._seconds_tried += self._narrow if seconds is None else seconds

    def _may_try(self) -> bool:
        return self._seconds_tried < TRIED_SHARE * (self._seconds - _FIRST_TRY * self._narrow)

    def _is_worth_waiting(self, acceptance: Acceptance, outlook: int, narrow: float) -> bool:
        """Whether a match of this length, which the next token may end, is worth that its draft follows at once.

        Without the wait the draft begins one token later: so what is won is a narrow pass, if there is a match and it
        goes on. In that case the launch would have to be waited for anyway.
        """
        right = acceptance.chance(outlook - 1) * acceptance.chance(outlook)
        # Where a launch takes as long as its pass, the model computes at once, and no device waits.
        return right * narrow > (1 - right) * min(self._launching, narrow - self._launching)

    def _best(
        self, acceptance: Acceptance, option: DraftOption, carried: int, seconds: list[float], head_step: float
    ) -> tuple[float, int]:
        """The gain of the length that gains most, and that length; 0: none gains enough.

        `seconds`: of passes by their width.
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
            proposing = head_step * option.head_steps(drafted)
            gain = (1 + expected) * base / (seconds[carried + 1 + drafted] + again + proposing)
            if gain > best_gain:
                best, best_gain = drafted, gain
        return best_gain, best
