"""Whether a draft pays: what a forward pass costs by its width, and how often proposals were right. Pure.

A pass over one token reads all weights once; a pass over four reads them once, too, and yields up to four tokens. How
much longer it takes depends on the machine, the model and the length of the context, so it is measured, not assumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from start_llm.engine.decode.draft import FORCED_MATCH

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MOST_DRAFTED = WIDTHS[-1] - 1
MOST_WIDE = 2 * WIDTHS[-1]
"""Tokens in one pass, those that are carried included."""

LEAST_GAIN = 1.05

_MEMORY = 0.1  # weight of one observed time
_SHARED = 0.7  # of that weight: a machine that gets busy or idle changes all times alike
_OUTLIER = 3.0  # a time so many times longer or shorter than expected says little about the next one
_MATCHES = (3, 4, 5, 6, 8, 12, 16, 24, 32, FORCED_MATCH)
# The share of right tokens by length of the match, counted in recorded coding sessions.
_PRIOR = (0.55, 0.65, 0.75, 0.79, 0.86, 0.86, 0.92, 0.94, 0.97, 0.97)
_PRIOR_WEIGHT = 8.0
_DECAY = 0.97


class CostTable:
    """Seconds of a forward pass by width (tokens computed) and length (tokens in the KV).

    Args:
        measured: seconds by width, for one or more lengths.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        self._lengths = sorted(measured)
        self._rows = [[_between(measured[length], width) for width in WIDTHS] for length in self._lengths]

    def seconds(self, width: int, length: int) -> float:
        """On straight lines between what was measured; a width beyond the widest costs in proportion."""
        if width > WIDTHS[-1]:
            return self.seconds(WIDTHS[-1], length) * width / WIDTHS[-1]
        column = bisect_left(WIDTHS, width)
        high = self._at(column, length)
        if WIDTHS[column] == width:
            return high
        low = self._at(column - 1, length)
        return low + (high - low) * (width - WIDTHS[column - 1]) / (WIDTHS[column] - WIDTHS[column - 1])

    def observe(self, width: int, length: int, seconds: float) -> None:
        """A pass took so long; the nearest entries move towards it, and the other widths follow, though not as far.

        Without that, a machine that was busy when it was measured would look slow for wide passes for ever: they
        would never be tried.
        """
        expected = self.seconds(width, length)
        if width > WIDTHS[-1] or expected <= 0:
            return
        ratio = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
        factor = 1 + _MEMORY * (ratio - 1)
        column = bisect_left(WIDTHS, width)
        columns = [column] if WIDTHS[column] == width else [column - 1, column]
        row, share = self._place(length)
        for r in {row, row + (share > 0)}:
            weight = 1.0 if share in (0.0, 1.0) else (share if r > row else 1 - share)
            for c in range(len(WIDTHS)):
                part = weight if c in columns else weight * _SHARED
                self._rows[r][c] *= 1 + part * (factor - 1)

    def table(self) -> dict[int, dict[int, float]]:
        """Seconds by length and width as they stand."""
        return {
            length: dict(zip(WIDTHS, row, strict=True)) for length, row in zip(self._lengths, self._rows, strict=True)
        }

    def _at(self, column: int, length: int) -> float:
        row, share = self._place(length)
        low = self._rows[row][column]
        if share == 0.0:
            return low
        return max(low + (self._rows[row + 1][column] - low) * share, low * 0.5)

    def _place(self, length: int) -> tuple[int, float]:
        """The row below this length and the share of the next one; beyond the last one it is more than 1."""
        lengths = self._lengths
        if len(lengths) == 1 or length <= lengths[0]:
            return 0, 0.0
        row = min(bisect_right(lengths, length) - 1, len(lengths) - 2)
        return row, (length - lengths[row]) / (lengths[row + 1] - lengths[row])


class Acceptance:
    """How often the next token was the proposed one, by the length of the match; what is recent weighs more."""

    def __init__(self) -> None:
        self._right = [_PRIOR_WEIGHT * share for share in _PRIOR]
        self._tried = [_PRIOR_WEIGHT] * len(_PRIOR)

    def chance(self, match: int) -> float:
        """That the token behind a match of this length is right."""
        bucket = self._bucket(match)
        return self._right[bucket] / self._tried[bucket]

    def observe(self, match: int, right: bool) -> None:
        bucket = self._bucket(match)
        self._right[bucket] = self._right[bucket] * _DECAY + right
        self._tried[bucket] = self._tried[bucket] * _DECAY + 1.0

    @staticmethod
    def _bucket(match: int) -> int:
        return max(0, bisect_right(_MATCHES, match) - 1)


class DraftGate:
    """Decides how much of a proposal is worth computing.

    Args:
        carries: after a rejection the accepted tokens have to be computed again, with the next pass.
    """

    def __init__(self, costs: CostTable, acceptance: Acceptance, carries: bool = False) -> None:
        self.costs, self.acceptance, self.carries = costs, acceptance, carries
        self._widths: list[float] = []  # seconds by width as they were lately, for contexts near `_near`
        self._near, self._uses = -1, 0

    def length(self, match: int, most: int, *, carried: int, context: int) -> int:
        """Tokens to draft; 0 if none pays.

        Args:
            most: tokens that are proposed.
            carried: tokens that must be computed before them anyway, beside the newest one.
            context: tokens in the KV.
        """
        seconds = self._seconds(context)
        base = seconds[carried + 1]
        best, best_gain = 0, LEAST_GAIN
        expected, chance, again = 0.0, 1.0, 0.0
        for drafted in range(1, min(most, MOST_DRAFTED, MOST_WIDE - carried - 1) + 1):
            right = self.acceptance.chance(match + drafted - 1)
            if self.carries:  # if it fails here, what came before is computed once more
                again += chance * (1 - right) * (seconds[drafted + 1] - seconds[1])
            chance *= right
            expected += chance
            if chance < 0.02:
                break
            gain = (1 + expected) * base / (seconds[carried + 1 + drafted] + again)
            if gain > best_gain:
                best, best_gain = drafted, gain
        return best

    def _seconds(self, context: int) -> list[float]:
        self._uses += 1
        if context >> 9 != self._near or self._uses >= 32:
            self._near, self._uses = context >> 9, 0
            self._widths = [self.costs.seconds(max(1, width), context) for width in range(MOST_WIDE + 1)]
        return self._widths

    def hopeful(self, outlook: int, *, context: int) -> bool:
        """Whether a match of at most this length could be worth a draft."""
        return outlook >= _MATCHES[0] and self.length(outlook, MOST_DRAFTED, carried=0, context=context) > 0


def _between(seconds: Mapping[int, float], width: int) -> float:
    below = max((w for w in seconds if w <= width), default=min(seconds))
    above = min((w for w in seconds if w >= width), default=max(seconds))
    if below == above:
        return seconds[below]
    return seconds[below] + (seconds[above] - seconds[below]) * (width - below) / (above - below)
