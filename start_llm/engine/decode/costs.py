"""What a forward pass costs, by its width and its context. Pure: knows numbers, no clock and no MLX. One thread.

A pass over one token reads all weights once. A pass over four tokens reads them once, too, and may yield four tokens.
How much longer it takes depends on the machine, the model and the context, so it is learnt from what passes took: those
that are measured at load, decode passes, and prefill chunks, which are wide passes at long contexts.

Theory of operation:

- The model is a sum of parts, each with a coefficient that is never negative, so it never falls as width or context
  grows: `weights + width + steps in width + context + context x width + attention over a window`. All of it is
  multiplied with the *slowness* of the machine, which is 1 at first.
- Passes of about the same width and context are one *kind*. For each kind the usual time is kept, without the
  slowness: one time changes it by a little, whatever it says.
  It begins with the middle one of three times, or with the quickest if they differ: others that compute can only make
  a pass slower.
- The coefficients are fitted to the usual times, by relative errors. What was seen lately weighs more, and what was
  never seen stays near what is believed at first: that wide passes cost little. A pass that is tried tells the truth.
- Three times in a row that are slower than usual mean a change. Two quick ones are enough, for nobody makes passes
  quicker than they are. The slowness is what narrow passes say: if those
  of a narrow kind have changed and no other narrow kind was as usual meanwhile, somebody else is busy, or there is
  another power mode. Else the usual time of this kind alone has changed.
- Times of a wide kind prove nothing by themselves: somebody's burst slows all passes. Its usual time changes only if a
  narrow pass among them was as usual. Where there was none, `wants_narrow` asks for one.
- If no coefficients explain the first three times of a new narrow kind together with what was seen long ago, the
  slowness has changed, too: the machine was busy when the model was loaded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from start_llm.files.lru import Lru

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MOST_DRAFTED = WIDTHS[-1] - 1
MOST_WIDE = 2 * WIDTHS[-1]  # tokens in one pass of a row that decodes, those that are carried included

UNKNOWN_SECONDS = 0.05  # what a pass is taken to take before the first one was observed

_KINDS = 192  # that are kept; those seen last
_SETTLED = 3  # times that make a kind's usual time, or change the machine's speed
_NARROW = 4  # tokens
_QUICK = 2  # times in a row that are quicker than usual, and about equal, are a change
_BURST = 10.0  # others that compute make a pass slower by less
_CHANGED = 1.4  # a time that differs by more is none of the usual ones
_NEWEST, _NEWEST_USUAL = 0.1, 0.05  # weight of one time in the slowness, and in the usual time of its kind
_NOISE = 0.1  # of a usual time, as a share
_NOW, _LATELY = 8, 64  # passes
_HALF_LIFE = 300  # passes after which what a kind says has half its weight
_LEAST_WEIGHT = 0.25
_OFF = 0.08  # the coefficients are fitted again once a usual time is off by such a share,
_PATIENCE, _MOST_PATIENCE = 4, 256  # but not before so many passes; twice as many each time that this does not help
_HUBER, _ROUNDS = 1.5, 3  # standard deviations beyond which an error counts less; rounds of weighing errors
_MISFIT = 8.0  # standard deviations by which a new kind may spoil the fit of the others
_MOST_SLOWNESS = 1e4
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 3600.0  # no pass takes less or more: the clock is wrong
_SPREAD = 100.0  # a time that is quicker than a usual narrow one by more says nothing
_FAR = 4096.0  # tokens of context that the beliefs about the context's coefficients go by

# What is believed of each part before anything is known: mean and standard deviation, in units of the quickest pass.
_WEIGHTS, _WIDTH, _STEP = (1.0, 0.5), (0.02, 0.5), (0.0, 0.3)  # the last one for each token of a step
_CONTEXT, _CROSS, _WINDOW = (0.0, 2.0 / _FAR), (0.0, 0.1 / _FAR), (0.0, 0.5)

_STEPS = list(pairwise(WIDTHS))


@dataclass(slots=True)
class _Kind:
    """Passes of about one width and context."""

    width: int  # of the first of them
    context: int
    usual: float = 0.0  # seconds that such a pass takes; 0 until `_SETTLED` were seen
    recent: list[tuple[int, float]] = field(default_factory=list)  # number and seconds, as if of that width and context
    as_usual: int = 0  # number of the last one that was as usual
    changed: int = 0  # number of the one at which the usual time changed

    @property
    def is_narrow(self) -> bool:
        return self.width <= _NARROW

    @property
    def seconds(self) -> float:
        return self.usual or statistics.median_low(seconds for _, seconds in self.recent)

    @property
    def seen(self) -> int:
        """The number of the last one."""
        return self.recent[-1][0]

    def add(self, number: int, seconds: float) -> float:
        """One more. Returns by which factor the last ones are slower than usual, 1.0 if some of them were as usual."""
        self.recent = [*self.recent[1 - _SETTLED :], (number, seconds)]
        if self.usual / _CHANGED <= seconds <= self.usual * _CHANGED:
            self.as_usual = number
            self.usual *= (seconds / self.usual) ** _NEWEST_USUAL
            return 1.0
        times = [seconds for _, seconds in self.recent]
        if not self.usual:
            if len(times) == _SETTLED:
                self.usual = _undisturbed(times)
            return 1.0
        if min(times) > self.usual * _CHANGED:
            return min(times) / self.usual
        quick = times[-_QUICK:]
        if max(quick) < self.usual / _CHANGED and max(quick) < min(quick) * _CHANGED:
            return max(quick) / self.usual
        return 1.0

    def slow_down(self, factor: float, since: int) -> None:
        """The machine is slower by this factor since a pass of that number."""
        self.recent = [(number, seconds / factor if number >= since else seconds) for number, seconds in self.recent]
        if self.changed >= since:
            self.usual /= factor


class PassCosts:
    """Seconds of a forward pass. `window`: tokens that attention over a window sees; 0: no layer has one.

    Attributes:
        wants_narrow: wide passes have changed, and no narrow pass has told yet whether the machine has.
    """

    wants_narrow = False

    def __init__(self, window: int = 0) -> None:
        self._window = window
        parts = [_WEIGHTS, _WIDTH, *((_STEP[0], _STEP[1] * (high - low)) for low, high in _STEPS), _CONTEXT, _CROSS]
        parts += [(_WINDOW[0], _WINDOW[1] / window)] if window else []
        self._believed, self._deviation = (np.array(column) for column in zip(*parts, strict=True))
        self._set(self._believed * UNKNOWN_SECONDS)
        self._kinds: Lru[tuple[int, int], _Kind] = Lru(_KINDS)
        self._slowness = 1.0
        self._passes, self._fitted, self._patience = 0, 0, _PATIENCE
        self._quickest, self._slowest, self._longest = math.inf, 0.0, 1
        self._near, self._widths = (-1, -1, -1), list[float]()

    def observe(self, width: int, context: int, seconds: float) -> None:
        """A pass over `width` tokens, behind `context` tokens in the KV, took so long."""
        if not _LEAST_SECONDS < seconds < _MOST_SECONDS or width < 1 or context < 0:
            return
        self._passes += 1
        self._quickest, self._slowest = min(self._quickest, seconds), max(self._slowest, seconds)
        self._longest = max(self._longest, context)
        key = round(4 * math.log2(width)), round(2 * math.log2(1 + context / 64))
        if (kind := self._kinds.get(key)) is None:
            self._kinds.put(key, kind := _Kind(width, context))
        brought = self._modelled(kind.width, kind.context) / self._modelled(width, context) / self._slowness
        was_settled = kind.usual > 0
        self.wants_narrow = self.wants_narrow and not kind.is_narrow
        factor = kind.add(self._passes, seconds * brought)
        if kind.is_narrow and kind.as_usual == self._passes:
            self._slowness *= (seconds * brought / kind.usual) ** _NEWEST
        if factor != 1.0:
            self._change(kind, factor)
        elif not was_settled and kind.usual:
            self._settle(kind)
        elif self._is_off(kind) and (not kind.usual or self._passes - self._fitted >= self._patience):
            self._fit()
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if self._is_off(kind) else _PATIENCE

    def seconds(self, width: int, context: int) -> float:
        """What a pass is expected to take.

        A narrow one is no quicker than the quickest that was seen, and no slower than the slowest, in proportion where
        the context is longer than any. A wide one costs at most as much as its tokens one by one.
        """
        narrow = self._slowness * self._modelled(1, context)
        if self._passes:
            narrow = min(max(narrow, self._quickest), self._slowest * max(1.0, context / self._longest))
        if width <= 1:
            return narrow
        return min(max(narrow, self._slowness * self._modelled(width, context)), width * narrow)

    def by_width(self, context: int) -> list[float]:
        """What `seconds` said lately, for about this context, of passes over 0 (as over 1) to `MOST_WIDE` tokens."""
        near = context >> 9, self._fitted, self._passes >> 6
        if near != self._near:
            self._near = near
            self._widths = [self.seconds(width, context) for width in range(MOST_WIDE + 1)]
        return self._widths

    def _modelled(self, width: int, context: int) -> float:
        at_none = self._at_none[width] if width <= MOST_WIDE else self._at_none[-1] + self._more * (width - MOST_WIDE)
        by_context = self._context + self._cross * (width - 1)
        return float(at_none + context * by_context + self._seen * min(context, self._window))

    def _set(self, coefficients: NDArray[np.float64]) -> None:
        self._coefficients = coefficients
        self._context, self._cross, self._seen = [*coefficients[len(_STEPS) + 2 :].tolist(), 0.0][:3]
        self._more = float(coefficients[1])
        widths = np.maximum(1, np.arange(MOST_WIDE + 1))
        self._at_none: list[float] = (self._parts(widths, np.zeros_like(widths)) @ coefficients).tolist()

    def _is_off(self, kind: _Kind) -> bool:
        """Whether the coefficients should be fitted again for this kind."""
        return abs(kind.seconds / self._modelled(kind.width, kind.context) - 1) > _OFF

    def _change(self, kind: _Kind, factor: float) -> None:
        """Passes of this kind have become slower by a factor: is it the kind, or the machine?"""
        first = kind.recent[0][0]
        as_usual = self._narrow_as_usual(first, kind)
        if kind.is_narrow and not as_usual:
            self._slow_down(factor, kind.as_usual or first)
        elif as_usual:
            kind.usual *= factor
            kind.changed = kind.as_usual = self._passes
        else:
            self.wants_narrow = True
            return
        self._fit()

    def _narrow_as_usual(self, since: int, but: _Kind) -> bool:
        """A narrow pass of another kind was as usual, at that number or behind it."""
        return any(k.as_usual >= since for k in self._kinds.values() if k.is_narrow and k is not but)

    def _slow_down(self, factor: float, since: int) -> None:
        self._slowness *= factor
        for kind in self._kinds.values():
            kind.slow_down(factor, since)
        if not 1 / _MOST_SLOWNESS < self._slowness < _MOST_SLOWNESS:  # what was seen before was no machine
            last = self._kinds.values()[-1].recent[-1][1] * self._slowness
            self._kinds.clear()
            self._slowness = 1.0
            self._set(self._believed * last)

    def _settle(self, kind: _Kind) -> None:
        """A new kind's usual time is known. If that and what is old have no explanation, the machine has changed.

        Not so if a kind was as usual lately. A wide kind that is a surprise waits until a narrow one was as usual.
        """
        first = kind.recent[0][0]
        old = [other for other in self._kinds.values() if self._passes - other.seen > _NOW]
        if old and not kind.is_narrow and not self._narrow_as_usual(first, kind):
            ratio = kind.usual / self._modelled(kind.width, kind.context)
            if not 1 / _CHANGED < ratio < _CHANGED:
                kind.usual, self.wants_narrow = 0.0, True
        if old and kind.is_narrow and not self._narrow_as_usual(max(1, self._passes - _LATELY), kind):
            self._fit(old)
            expected, apart = self._modelled(kind.width, kind.context), self._misfit(old)
            self._fit([*old, kind])
            if self._misfit([*old, kind]) > apart + _MISFIT:
                self._slow_down(kind.usual / expected, first)
                kind.usual = expected
        self._fit()

    def _misfit(self, kinds: Iterable[_Kind]) -> float:
        """How badly the coefficients explain what is usual, in standard deviations over all these kinds."""
        return sum(self._weight(k) * abs(math.log(k.seconds / self._modelled(k.width, k.context))) for k in kinds)

    def _fit(self, kinds: Sequence[_Kind] = ()) -> None:
        """The coefficients that make relative errors and distances from what is believed smallest; none is negative.

        An error that is large counts by its size, not by its square (Huber's weights).

        `kinds`: the only ones that count; empty: all.
        """
        self._fitted = self._passes
        kinds = kinds or self._kinds.values()
        if not kinds:
            return
        times = np.array([kind.seconds for kind in kinds])
        # One wrong clock must not say what the beliefs are measured in.
        unit = min((kind.usual for kind in kinds if kind.usual and kind.is_narrow), default=float(times.min()))
        times = np.maximum(times, unit / _SPREAD)
        parts = self._parts(np.array([k.width for k in kinds]), np.array([k.context for k in kinds]))
        parts *= unit * self._deviation
        weights = np.array([self._weight(kind) for kind in kinds])
        believed = self._believed / self._deviation
        scaled = np.maximum(self._coefficients / (unit * self._deviation), 0.0)
        for _ in range(_ROUNDS):
            against = np.maximum(times, parts @ scaled)
            errors = weights * np.abs(parts @ scaled - times) / against
            row_weights = weights * np.sqrt(np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9))) / against
            rows = parts * row_weights[:, None]
            scaled = _not_negative(rows.T @ rows + np.eye(len(believed)), rows.T @ (row_weights * times) + believed)
        self._set(np.maximum(scaled, 1e-9) * self._deviation * unit)

    def _weight(self, kind: _Kind) -> float:
        age = 0.5 ** ((self._passes - kind.seen) / _HALF_LIFE)
        settled = 1.0 if kind.usual else len(kind.recent) / _SETTLED
        return math.sqrt(max(_LEAST_WEIGHT, age) * settled) / _NOISE

    def _parts(self, widths: NDArray[np.int64], contexts: NDArray[np.int64]) -> NDArray[np.float64]:
        """What each coefficient is multiplied with, [passes, coefficients]."""
        more = widths - 1
        columns = [np.ones(len(widths)), more]
        columns += [np.clip((widths - low) / (high - low), 0, 1) for low, high in _STEPS]
        columns += [contexts, contexts * more]
        if self._window:
            columns.append(np.minimum(contexts, self._window))
        return np.stack(columns, axis=1).astype(np.float64)


def _undisturbed(times: Sequence[float]) -> float:
    """What a pass takes that took so long: the usual time, or the quickest where others seem to have computed, too."""
    usual = statistics.median(times)
    quickest = min(time for time in times if time > usual / _BURST)
    return quickest if usual > quickest * _CHANGED else usual


def _not_negative(matrix: NDArray[np.float64], goal: NDArray[np.float64]) -> NDArray[np.float64]:
    """The solution of ``matrix @ x = goal``; what would be negative is 0, and the rest is solved again."""
    positive = np.ones(len(goal), dtype=bool)
    found = np.zeros(len(goal))
    while True:
        found[:] = 0.0
        found[positive] = np.linalg.solve(matrix[np.ix_(positive, positive)], goal[positive])
        if found.min() >= 0:
            return found
        positive &= found > 0.5 * found.min()
