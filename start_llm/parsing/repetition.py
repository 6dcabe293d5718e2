"""Finds out that an answer repeats itself and will not stop by itself.

A period of 1 to 128 tokens repeats for so long that no sound text does it. Of 2,500 files of a Linux system (sources,
tables, licences, binaries in base64), read as answers, the longest run of equal periods has 817 tokens, all of zeros or
of one letter. With two different words in the period it has under 300.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

LONGEST_PERIOD = 128  # tokens
WORDS_REPEAT, ANYTHING_REPEATS = 1024, 4096  # tokens that are equal to those a period before
_EVERY = 64  # tokens between two looks
_ENDS = 4  # tokens that must be equal for a period to be looked at
_WORD = re.compile(r"[^\W\d_]{2,}")


class RepetitionGuard:
    """One answer. Used by the thread of its request.

    A look comes once in 64 tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: the text of some tokens."""
        self._decode = decode
        self._tokens = np.zeros(ANYTHING_REPEATS + LONGEST_PERIOD + _EVERY, dtype=np.int64)
        self._count = 0  # tokens in the buffer
        self._runs = np.zeros(LONGEST_PERIOD + 1, dtype=np.int64)  # equal tokens at the end, by period

    def run(self, period: int) -> int:
        """How many tokens at the end are equal to those a period before."""
        return int(self._runs[period])

    def add(self, token: int) -> int:
        """The period in tokens, once it is certain; 0 before."""
        if self._count == len(self._tokens):
            self._tokens[: -_EVERY * 2] = self._tokens[_EVERY * 2 :].copy()
            self._count -= _EVERY * 2
        self._tokens[self._count] = token
        self._count += 1
        return 0 if self._count % _EVERY else self._look()

    def _look(self) -> int:
        count, tokens = self._count, self._tokens
        new = tokens[count - _EVERY : count]
        periods = np.arange(1, min(LONGEST_PERIOD, count - _EVERY) + 1)
        ends = np.ones(len(periods), dtype=bool)
        for back in range(1, _ENDS + 1):
            ends &= tokens[count - back - periods] == tokens[count - back]
        runs = np.zeros_like(self._runs)
        for period in periods[ends]:
            differs = np.flatnonzero(new != tokens[count - _EVERY - period : count - period])
            runs[period] = _EVERY - 1 - differs[-1] if len(differs) else self._runs[period] + _EVERY
        self._runs = runs
        period = int(np.argmax(self._runs >= WORDS_REPEAT))
        if not period:
            return 0
        if self._runs[period] >= ANYTHING_REPEATS:
            return period
        words = {word.lower() for word in _WORD.findall(self._decode(self._tokens[count - period : count].tolist()))}
        return period if sum(len(set(word)) > 1 for word in words) > 1 else 0
