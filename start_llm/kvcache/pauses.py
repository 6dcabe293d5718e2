"""How soon a silent conversation is likely to come back, judged by earlier pauses. Pure; knows no tree and no bytes.

The idea: the longer a pause has lasted, the longer it will still last. A coding agent comes back within seconds while
its tools run, a person within minutes or not at all. So the question is: of all pauses that lasted as long as this
one, how many ended soon after, and how long was it until then? KV that waits takes room, so returns are counted by
seconds of waiting. Each conversation has habits of its own, and those of all others tell what is usual.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

_SOON = 40.0  # seconds
_SOON_SHARE = 0.25  # of a long silence, for pauses of an hour are too few to tell what happens within 40 seconds
_OTHERS_COUNT = 10  # what all conversations do counts as much as so many pauses of this one


class Pauses:
    """The last `most` pauses between two turns of a conversation, in seconds."""

    def __init__(self, most: int) -> None:
        self._recent: deque[float] = deque(maxlen=most)
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    @property
    def longest(self) -> float:
        """Seconds; 0: there are none."""
        return self._sorted[-1] if self._sorted else 0.0

    def ended(self, silence: float, soon: float) -> tuple[int, int, float]:
        """Of the pauses of at least `silence` seconds: how many ended within `soon` more, how many there are, and for
        how many of these `soon` seconds they lasted together."""
        first, last = bisect_left(self._sorted, silence), bisect_left(self._sorted, silence + soon)
        ended, longer = last - first, len(self._sorted) - last
        return ended, ended + longer, sum(self._sorted[first:last]) - silence * ended + soon * longer


def rate_of_return(silence: float, own: Pauses, everyone: Pauses, silences: Sequence[float]) -> float:
    """How soon a conversation that is silent for `silence` seconds is likely to come back: returns for each second of
    waiting. A wait ends with the return, or is given up when `soon` is over.

    Args:
        own: the conversation's pauses.
        everyone: those of all conversations.
        silences: how long each conversation is silent now, ascending: pauses that have not ended yet.
    """
    soon = max(_SOON, silence * _SOON_SHARE)
    ended, lasted, seconds = everyone.ended(silence, soon)
    silent = len(silences) - bisect_left(silences, silence)
    weight = _OTHERS_COUNT / max(lasted + silent, 1)
    own_ended, _, own_seconds = own.ended(silence, soon)
    return (own_ended + weight * ended) / (own_seconds + soon + weight * (seconds + silent * soon))
