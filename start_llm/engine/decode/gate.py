"""Whether a draft pays, and how long it should be. Pure: knows numbers, no MLX. Model thread only.

A draft is as long as is expected to gain most: right tokens for the seconds that its pass takes. How often tokens are
right is counted (`draft.Acceptance`). What passes take is measured (`PassCosts`): seconds of narrow
ones (one token), and what wide ones take as multiples of these. Of the last times a low one counts: others only make a
pass slower. After a wide pass that took other than expected a narrow one tells whether the machine has changed. A width
that was never seen is taken to be cheap, and longer drafts are tried now and then: a try tells the truth.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from start_llm.engine.decode.draft import HEAD_MATCH, LEAST_MATCH, Acceptance, DecodeCounts, Proposal

Clock = Callable[[], float]  # seconds
WIDTHS: tuple[int, ...] = (*range(1, 17), 20, 24, 28, 32, 48, 64)  # that are told apart
MOST_DRAFTED = 31
MOST_WIDE = WIDTHS[-1]  # tokens in one pass of a row that decodes, those that are carried included
MOST_HEADED = 8  # tokens that a head proposes at once; the further it goes the less it knows

_UNKNOWN_SECONDS = 0.05  # what a pass is taken to take before the first one was observed
_TOKEN = 0.02  # of a narrow pass: what a token more is taken to cost where nothing is known
_KEPT = 8  # times
_SURPRISE = 1.4  # a time that differs by more from what is expected is none of the usual ones
_CELLS = [WIDTHS[bisect_left(WIDTHS, width)] for width in range(MOST_WIDE + 1)]

_LEAST_GAIN = 1.05
_TRIED_SHARE = 0.005  # of the seconds that decoding takes: what passes may take that are only tried
_TRIED_LENGTHS = (7, 31, 15)
_WORTH_WAITING = 0.2  # chance of a draft's first token, from which on it pays that the device waits for its launch


class PassCosts:
    """A row for each octave of context. `wants_narrow`: a narrow pass has to tell what wide ones are compared with."""

    def __init__(self) -> None:
        self._narrow: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))  # seconds, by octave
        self._multiples: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._known: dict[int, list[float]] = {}  # multiples by width, of an octave, as they are now
        self._is_steady = False  # the last narrow pass took as long as usual, and no wide one since then was a surprise
        self._surprises = 0  # since the last narrow pass
        self.wants_narrow = True

    def observe(self, width: int, context: int, seconds: float) -> None:
        """A pass over `width` tokens, behind `context` tokens in the KV, took so long."""
        if not 1e-6 < seconds < 3600 or not 1 <= width <= MOST_WIDE:
            return  # the clock is wrong
        octave = _octave(context)
        if width == 1 or not self._narrow:  # rows that decode together make no narrow pass
            self._narrow[octave].append(seconds / self._multiples_at(octave)[width])
        known = self.by_width(context)
        is_usual = octave in self._narrow and 1 / _SURPRISE < seconds / known[width] < _SURPRISE
        if width == 1:
            self._is_steady, self.wants_narrow, self._surprises = is_usual, False, 0
        elif is_usual or self._is_steady or self._surprises >= _KEPT:
            self._multiples[octave, _CELLS[width]].append(max(1.0, seconds / known[1]))
            self._known.clear()
            self._is_steady &= is_usual
        else:
            self._surprises += 1
            self.wants_narrow = True

    def by_width(self, context: int) -> list[float]:
        """Seconds of passes over 0 (as 1) to `MOST_WIDE` tokens: at least those of one token, at most those of each."""
        octave, narrow = _octave(context), _UNKNOWN_SECONDS
        if self._narrow:
            narrow = _low(self._narrow[min(self._narrow, key=lambda known: abs(known - octave))])
        return [narrow * multiple for multiple in self._multiples_at(octave)]

    def _multiples_at(self, octave: int) -> list[float]:
        """By width, from the nearest octave at which a width was seen twice: a first pass may have compiled."""
        if octave not in self._known:
            nearest = sorted(self._multiples, key=lambda seen: -abs(seen[0] - octave))  # the last one of a width counts
            seen = {width: self._multiples[at, width] for at, width in nearest if len(self._multiples[at, width]) > 1}
            found = [1.0, 1.0]
            for width in range(2, MOST_WIDE + 1):
                times = seen.get(_CELLS[width])
                found.append(min(width, found[-1] + _TOKEN if times is None else _low(times)))
            self._known[octave] = found
        return self._known[octave]


def _octave(context: int) -> int:
    return (max(0, context) >> 9).bit_length()


def _low(times: deque[float]) -> float:
    return sorted(times)[len(times) // 4]


class DraftOption(NamedTuple):
    """What one source proposes: up to `most` tokens. `match`: what `Acceptance` knows the first one by."""

    match: int
    most: int


class DraftGate:
    """`carries`: after a rejection the accepted tokens have to be computed again, with the next pass.

    `head`: seconds that a step of the model's head takes, 0 while nobody knows; ``None``: it has no head. `acceptance`:
    of all rows. `clock`: seconds, by which passes are measured.
    """

    def __init__(
        self, costs: PassCosts, carries: bool = False, head: float | None = None, clock: Clock | None = None
    ) -> None:
        self.costs, self.carries, self.head = costs, carries, head
        self.clock = clock or (lambda: time.perf_counter())
        self.acceptance = Acceptance()
        self._seconds = self._seconds_tried = 0.0
        self._tries = 0
        self._head_steps: deque[float] = deque(maxlen=_KEPT)

    def choose(self, options: Sequence[DraftOption], *, carried: int, context: int) -> tuple[int, int]:
        """Which of the options to take, one at least, and how many tokens of it; 0 if none pays.

        `carried`: tokens that must be computed before them anyway, beside the newest one. `context`: tokens in the KV.
        """
        if self.costs.wants_narrow:
            self.costs.wants_narrow = False  # once: its time may not be known, where other models compute, too
            return 0, 0
        seconds = self.costs.by_width(context)
        gains = [self._best(option, carried, seconds) for option in options]
        index = gains.index(max(gains))
        length = gains[index][1]
        tried = index if length else self._tries % len(options)
        longer = min(options[tried].most, _TRIED_LENGTHS[self._tries % len(_TRIED_LENGTHS)], MOST_WIDE - carried - 1)
        if longer <= length or self._seconds_tried > _TRIED_SHARE * self._seconds:
            return index, length
        self._tries += 1
        self._seconds_tried += seconds[carried + 1 + longer]
        return tried, longer

    def hopeful(self, outlook: int, *, context: int) -> bool:
        """Whether a head, or a match of at most this length, could be worth a draft, or a try.

        For a draft the loop waits for the newest token before it launches the next pass, and the device meanwhile has
        no work. Without the wait the draft begins one token later.
        """
        options = [DraftOption(HEAD_MATCH, MOST_HEADED)] if self.head is not None else []
        chance = self.acceptance.chance
        if outlook >= LEAST_MATCH and chance(outlook - 1) * chance(outlook) > _WORTH_WAITING:
            options.append(DraftOption(outlook, MOST_DRAFTED))
        if not options or self._seconds_tried < _TRIED_SHARE * self._seconds:
            return bool(options)
        seconds = self.costs.by_width(context)
        return any(self._best(option, 0, seconds)[1] for option in options)

    def together(self, options: Sequence[DraftOption], *, context: int) -> int:
        """The width of a pass over a block of each row, by which each row's draft is cut; 1: none pays.

        `options`: one for each row; a match that is too short is nothing. `context`: tokens of all rows.
        """
        rows, seconds = len(options), self.costs.by_width(context)
        said, chances = float(rows), [float(option.match >= LEAST_MATCH) for option in options]
        best, best_gain = 1, _LEAST_GAIN
        for width in range(2, MOST_WIDE // rows + 1):
            for row, option in enumerate(options):
                more = width - 1 <= option.most
                chances[row] *= self.acceptance.chance(option.match + width - 2) if more else 0.0
            said += sum(chances)
            gain = said / rows * seconds[rows] / seconds[rows * width]
            if gain > best_gain:
                best, best_gain = width, gain
        return best

    def learn(self, counts: DecodeCounts, proposal: Proposal, drafted: int, right: int) -> None:
        """So many tokens of a row's proposal were computed, and so many of them were right."""
        counts.drafted += drafted
        counts.accept(proposal, right)
        for i in range(min(right + 1, drafted)):
            self.acceptance.observe(proposal.match + i, i < right)

    def observe(self, width: int, context: int, seconds: float) -> None:
        """A pass over so many tokens of rows that decode, behind `context` tokens in their KV, took so long."""
        self.costs.observe(width, context, seconds)
        self._seconds += seconds

    def proposed(self, steps: int, seconds: float) -> None:
        """The head has taken so many steps. The quickest of its times counts: the first one may have compiled."""
        self._head_steps.append(seconds / steps)
        self.head = min(self._head_steps)

    def _best(self, option: DraftOption, carried: int, seconds: list[float]) -> tuple[float, int]:
        """The gain of the length that gains most, and that length; 0: none gains enough. `seconds`: by width."""
        head_step = (self.head or 0.0) if option.match >= HEAD_MATCH else 0.0
        best, expected, chance, again = (_LEAST_GAIN, 0), 0.0, 1.0, 0.0
        for drafted in range(1, min(option.most, MOST_DRAFTED, MOST_WIDE - carried - 1) + 1):
            before, chance = chance, chance * self.acceptance.chance(option.match + drafted - 1)
            if self.carries:  # if it fails here, what came before is computed once more
                again += (before - chance) * (seconds[drafted + 1] - seconds[1])
            expected += chance
            took = seconds[carried + 1 + drafted] + again + head_step * drafted
            gain = (1 + expected) * seconds[carried + 1] / took
            best = (gain, drafted) if gain > best[0] else best
        return best
