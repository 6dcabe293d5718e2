"""A clock for the model thread on which nobody waits: what a pass would sleep is added, not slept.

The time of that thread is the time for which it computed, and what it would have slept. So the gate and the scheduler
see the times that they would see on a machine where nothing else runs, and a pass of 60 ms takes as long as the oracle
computes. What the oracle itself computes does not count: the clock is put back. What other threads do beside it is
counted where the model thread needs it: a row's index is there as late as its building took.

A pass is launched, and then computed by a device, one pass after the other. Launching takes the model thread a time of
its own: a model's layers are told to MLX by Python. As on Metal, a pass of one row without a draft (`SingleRow`) is not
waited for: the thread goes on, and waits where it reads the token that the pass draws. All other passes are waited for
at once.

All other threads keep the real clock.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from start_llm.core.work import Submit
from start_llm.engine.decode import drafting
from start_llm.engine.decode.draft import RowDrafts, SuffixIndex
from start_llm.engine.decode.row import RowState
from start_llm.engine.decode.verify import SingleRow

_MODEL_THREAD = "model"
_REAL_CLOCK, _REAL_TIME, _REAL_SLEEP = time.perf_counter, time.time, time.sleep
_INDEX_WAIT = 60.0  # real seconds


class VirtualClock:
    """
    Args:
        noise: standard deviation of what is slept, as a share of it.
        launching: seconds that the model thread needs to launch a pass.
        waits: for each pass at once, as where a model computes on the processor.

    Attributes:
        slept: seconds that the model thread would have slept; negative: that passes computed for too long.
    """

    def __init__(self, noise: float = 0.05, seed: int = 1, launching: float = 0.0, *, waits: bool = False) -> None:
        self._noise = noise
        self._launching = launching
        self._waits = waits
        self._chance = random.Random(seed)
        self.slept, self.now = 0.0, 0.0
        self._busy_until = 0.0  # the device
        self._is_drawing = False  # a token that is not waited for
        self._drawn: list[tuple[Any, float]] = []  # the last tokens, and when they are there

    def seconds(self) -> float:
        """The time of the calling thread. `now` is what the model thread read last."""
        if threading.current_thread().name != _MODEL_THREAD:
            return _REAL_CLOCK()
        self.now = time.thread_time() + self.slept
        return self.now

    def sleep(self, seconds: float) -> None:
        """On the model thread: a pass takes so long; less than 0: the clock is put back."""
        if threading.current_thread().name != _MODEL_THREAD:
            _REAL_SLEEP(seconds)
            return
        if seconds <= 0:
            self.slept += seconds
            return
        self.slept += self._launching
        taken = seconds * max(0.5, self._chance.gauss(1, self._noise))
        self._busy_until = max(self._busy_until, self.seconds()) + taken
        if self._waits or not self._is_drawing:
            self._wait(self._busy_until)

    def _wait(self, until: float) -> None:
        self.slept += max(0.0, until - self.seconds())

    def _time(self) -> float:
        """For the oracle's log."""
        return self.seconds() if threading.current_thread().name == _MODEL_THREAD else _REAL_TIME()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The oracle, the loops that decode and the scheduler go by this clock."""
        scheduling = SimpleNamespace(monotonic=self.seconds, sleep=self.sleep)
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, {"ORACLE_CLOCK": "virtual"}))
            stack.enter_context(patch("time.perf_counter", self.seconds))
            stack.enter_context(patch("time.time", self._time))
            stack.enter_context(patch("time.sleep", self.sleep))
            stack.enter_context(patch("start_llm.engine.ranks.interface.time", scheduling))
            stack.enter_context(patch.object(drafting, "_build", _timed(drafting._build)))
            stack.enter_context(patch.object(drafting.Drafts, "begin", self._beginning(drafting.Drafts.begin)))
            stack.enter_context(patch.object(SingleRow, "_draw_next", self._drawing(SingleRow._draw_next)))
            stack.enter_context(patch.object(SingleRow, "_read", self._reading(SingleRow._read)))
            stack.enter_context(patch.object(SingleRow, "leave", self._leaving(SingleRow.leave)))
            yield

    def _drawing(self, draw: Callable[[SingleRow, Any], None]) -> Callable[[SingleRow, Any], None]:
        def patched(row: SingleRow, fed: Any) -> None:
            self._is_drawing = True
            try:
                draw(row, fed)
            finally:
                self._is_drawing = False
            self._drawn = [*self._drawn[-1:], (row.state.newest, self._busy_until)]

        return patched

    def _reading(self, read: Callable[..., int]) -> Callable[..., int]:
        def patched(row: SingleRow, drawn: Any, *rest: Any) -> int:
            self._wait(max((until for token, until in self._drawn if token is drawn), default=0.0))
            return read(row, drawn, *rest)

        return patched

    def _leaving(self, leave: Callable[[SingleRow], RowState]) -> Callable[[SingleRow], RowState]:
        def patched(row: SingleRow) -> RowState:
            self._wait(self._busy_until)
            return leave(row)

        return patched

    def _beginning(self, begin: Callable[..., RowDrafts]) -> Callable[..., RowDrafts]:
        def patched(drafts: drafting.Drafts, work: Submit, generated: Sequence[int]) -> RowDrafts:
            row, began = begin(drafts, work, generated), self.seconds()
            find = row.find_drafter
            if find is not None:
                row.find_drafter = lambda: self._when_built(find, began)
            return row

        return patched

    def _when_built(self, find: Callable[[], Any], began: float) -> SuffixIndex | None:
        """The index, once its building would be over if it had begun at that time."""
        until = _REAL_CLOCK() + _INDEX_WAIT
        while (found := find()) is None:
            assert _REAL_CLOCK() < until, "an index could not be built"
            _REAL_SLEEP(0.001)
        index, seconds = found
        return index if self.seconds() >= began + seconds else None


def _timed(build: Callable[..., SuffixIndex | None]) -> Callable[..., tuple[SuffixIndex | None, float]]:
    def patched(*arguments: Any) -> tuple[SuffixIndex | None, float]:
        began = time.thread_time()
        return build(*arguments), time.thread_time() - began

    return patched
