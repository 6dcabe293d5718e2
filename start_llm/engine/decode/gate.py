"""Whether a draft pays, and how long it should be. Pure; model thread only.

A draft is as long as is expected to gain most: right tokens for the seconds that its pass takes. Passes are what their
costs (`costs`) say, right tokens what the conversation's own acceptance (`draft`) says.

A gate that says no would never see a wide pass again. So it tries a longer draft now and then, where that would pay if
wide passes cost no more than narrow ones. Tries take under a hundredth of the time, however wrong the costs are. Nor
does the gate go on with wide passes only: a narrow one now and then tells what they are compared with.
"""

from __future__ import annotations

from start_llm.engine.decode.costs import MOST_DRAFTED, MOST_WIDE, PassCosts
from start_llm.engine.decode.draft import LEAST_MATCH, Acceptance

LEAST_GAIN = 1.05
TRIED_SHARE = 0.008  # of the seconds that decoding takes: what passes may take that are only tried
_FIRST_TRY = 250  # narrow passes before it
_TRIED_LENGTHS = (7, 31, 15)
_WIDE_AT_MOST = 128  # passes in a row that may be wide: what a narrow one takes has to be known, too
_HOPELESS = 0.02  # a token that is right less often ends a draft


class DraftGate:
    """`carries`: after a rejection the accepted tokens have to be computed again, with the next pass.

    `acceptance`: of all conversations.
    """

    def __init__(self, costs: PassCosts, carries: bool = False) -> None:
        self.costs, self.carries = costs, carries
        self.acceptance = Acceptance()
        self._seconds = self._seconds_tried = self._narrow = 0.0
        self._tries, self._is_trying = 0, False
        self._wide = _WIDE_AT_MOST  # passes in a row

    def length(self, acceptance: Acceptance, match: int, most: int, *, carried: int, context: int) -> int:
        """Tokens to draft; 0 if none pays.

        Args:
            acceptance: of the row's conversation.
            most: tokens that are proposed.
            carried: tokens that must be computed before them anyway, beside the newest one.
            context: tokens in the KV.
        """
        if self._wide >= _WIDE_AT_MOST:
            self._wide = 0
            return 0
        seconds = self.costs.by_width(context)
        length = self._best(acceptance, match, most, carried, seconds)
        if not self._may_try():
            return length
        longest = self._best(acceptance, match, most, carried, [seconds[1]] * len(seconds))
        longer = [tried for tried in _TRIED_LENGTHS if tried > length]
        if longest <= length or not longer:
            return length
        self._is_trying = True
        return min(longest, longer[self._tries % len(longer)])

    def hopeful(self, acceptance: Acceptance, outlook: int, *, context: int) -> bool:
        """Whether a match of at most this length could be worth a draft, or a try."""
        if outlook < LEAST_MATCH:
            return False
        seconds = self.costs.by_width(context)
        return self._may_try() or self._best(acceptance, outlook, MOST_DRAFTED, 0, seconds) > 0

    def observe(self, width: int, context: int, seconds: float) -> None:
        """A pass of a row that decodes took so long."""
        self.costs.observe(width, context, seconds)
        self._seconds += seconds
        self._wide = 0 if width == 1 else self._wide + 1
        self._narrow = seconds if width == 1 else self._narrow
        if self._is_trying and width > 1:
            self._is_trying = False
            self._tries += 1
            self._seconds_tried += seconds

    def _may_try(self) -> bool:
        return not self._is_trying and self._seconds_tried < TRIED_SHARE * (self._seconds - _FIRST_TRY * self._narrow)

    def _best(self, acceptance: Acceptance, match: int, most: int, carried: int, seconds: list[float]) -> int:
        """The length that gains most, if passes take so long by their width; 0: none gains enough."""
        base = seconds[carried + 1]
        best, best_gain = 0, LEAST_GAIN
        expected, chance, again = 0.0, 1.0, 0.0
        for drafted in range(1, min(most, MOST_DRAFTED, MOST_WIDE - carried - 1) + 1):
            right = acceptance.chance(match + drafted - 1)
            if self.carries:  # if it fails here, what came before is computed once more
                again += chance * (1 - right) * (seconds[drafted + 1] - seconds[1])
            chance *= right
            expected += chance
            if chance < _HOPELESS:
                break
            gain = (1 + expected) * base / (seconds[carried + 1 + drafted] + again)
            if gain > best_gain:
                best, best_gain = drafted, gain
        return best
