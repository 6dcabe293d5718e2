"""What a forward pass costs, by its width and its context. Pure: knows numbers, no clock and no MLX. One thread.

A pass over one token reads all weights once. So does a pass over four tokens, which may yield four. How much longer it
takes depends on the machine, the model and the context, so it is measured: in a table with a row for each octave of
context. A row has the seconds of narrow passes (one token), and what wide passes cost as multiples of these. So a
machine that becomes slow, or quick, changes one figure a row.

Others that compute can only make a pass slower, so of the last few times a low one counts. A wide pass that took much
more or less than expected proves nothing yet: `wants_narrow` asks for a narrow one, and if that is as usual, the width
has changed. If it is not, the machine has, and nothing is learnt of the width. A width that was never seen is taken to
cost what it does at the nearest context, or little if it was seen nowhere: a pass that is tried tells the truth.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise

import numpy as np

WIDTHS: tuple[int, ...] = (*range(1, 17), 20, 24, 28, 32, 48, 64)
MOST_DRAFTED = 31
MOST_WIDE = WIDTHS[-1]  # tokens in one pass of a row that decodes, those that are carried included

UNKNOWN_SECONDS = 0.05  # what a pass is taken to take before the first one was observed
_TOKEN = 0.02  # of a narrow pass: what a token more is taken to cost where nothing is known
_KEPT = 8  # times
_MOST_ROWS = 4  # that decode together; one of their passes says what a narrow one takes if none was seen yet
_SURPRISE = 1.4  # a time that differs by more from what is expected is none of the usual ones
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 3600.0  # no pass takes less or more: the clock is wrong

_NEAREST = [min(WIDTHS, key=lambda known: abs(known - width)) for width in range(MOST_WIDE + 1)]


class PassCosts:
    """Attributes:
    wants_narrow: a narrow pass has to tell whether the machine has changed, or the width.
    """

    wants_narrow = False

    def __init__(self) -> None:
        self._narrow: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))  # seconds, by octave
        self._multiples: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        """Of a narrow pass, by octave and width."""
        self._unsure: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)  # octave, width and seconds of surprises
        self._by_octave: dict[int, list[float]] = {}  # multiples by width, as they are now

    def observe(self, width: int, context: int, seconds: float) -> None:
        """A pass over `width` tokens, behind `context` tokens in the KV, took so long."""
        if not _LEAST_SECONDS < seconds < _MOST_SECONDS or not 1 <= width <= MOST_WIDE:
            return
        octave = _octave(context)
        if not self._narrow and 1 < width <= _MOST_ROWS:
            self._narrow[octave].append(seconds / self._multiples_at(octave)[width])
        if width == 1:
            self._narrow[octave].append(seconds)
            self._settle(_is_usual(seconds, _low(self._narrow[octave])))
        elif octave in self._narrow and _is_usual(seconds, self.by_width(context)[width]):
            self._learn(octave, width, seconds)
        else:
            self._unsure.append((octave, width, seconds))
            self.wants_narrow = True
            if len(self._unsure) == _KEPT:  # rows that decode together make no narrow pass
                self._settle(True)

    def by_width(self, context: int) -> list[float]:
        """Seconds that passes over 0 (as over 1) to `MOST_WIDE` tokens are expected to take.

        None is quicker than a narrow one, and none costs more than its tokens one by one.
        """
        octave = _octave(context)
        narrow = self._seconds(octave)
        return [narrow * multiple for multiple in self._multiples_at(octave)]

    def _seconds(self, octave: int) -> float:
        """Of a narrow pass."""
        if not self._narrow:
            return UNKNOWN_SECONDS
        return _low(self._narrow[min(self._narrow, key=lambda known: abs(known - octave))])

    def _multiples_at(self, octave: int) -> list[float]:
        if (known := self._by_octave.get(octave)) is not None:
            return known
        nearest = sorted(self._multiples, key=lambda seen: -abs(seen[0] - octave))  # the last one of a width counts
        found = {1: 1.0}
        for at, width in nearest:
            if len(times := self._multiples[at, width]) > 1:  # the first one may have compiled what all others use
                found[width] = _low(times)
        for narrower, width in pairwise(WIDTHS):
            found.setdefault(width, found[narrower] + _TOKEN * (width - narrower))
        line = np.interp(range(MOST_WIDE + 1), WIDTHS, [found[width] for width in WIDTHS]).tolist()
        return self._by_octave.setdefault(octave, line)

    def _settle(self, is_width: bool) -> None:
        """Whether surprises tell what their widths cost now."""
        for surprise in self._unsure if is_width else ():
            self._learn(*surprise)
        self._unsure.clear()
        self.wants_narrow = False

    def _learn(self, octave: int, width: int, seconds: float) -> None:
        """Of a wide pass. It counts for the nearest width of the table."""
        known, nearest = self._multiples_at(octave), _NEAREST[width]
        multiple = min(max(1.0, seconds / self._seconds(octave)), width)
        self._multiples[octave, nearest].append(multiple * known[nearest] / known[width])
        self._by_octave.clear()


def _octave(context: int) -> int:
    return (max(0, context) >> 9).bit_length()


def _is_usual(seconds: float, expected: float) -> bool:
    return expected / _SURPRISE < seconds < expected * _SURPRISE


def _low(times: deque[float]) -> float:
    return sorted(times)[len(times) // 4]
