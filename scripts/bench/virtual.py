"""A clock for the model thread on which nobody waits: what a pass would sleep is added, not slept.

The time of that thread is the time for which it computed, and what it would have slept. So the gate and the scheduler
see the times that they would see on a machine where nothing else runs, and a pass of 60 ms takes as long as the oracle
computes. Where the oracle computes for longer than the pass should take, the clock is put back. What other threads do
beside it is counted where the model thread needs it: a row's index is there as late as its building took.

All other threads keep the real clock.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from start_llm.core.work import Submit
from start_llm.engine.decode import drafting
from start_llm.engine.decode.draft import RowDrafts, SuffixIndex

_MODEL_THREAD = "model"
_REAL_CLOCK, _REAL_TIME, _REAL_SLEEP = time.perf_counter, time.time, time.sleep
_INDEX_WAIT = 60.0  # real seconds


class VirtualClock:
    """
    Args:
        noise: standard deviation of what is slept, as a share of it.

    Attributes:
        slept: seconds that the model thread would have slept; negative: that passes computed for too long.
    """

    def __init__(self, noise: float = 0.05, seed: int = 1) -> None:
        self._noise, self._chance = noise, random.Random(seed)
        self.slept, self.now = 0.0, 0.0

    def seconds(self) -> float:
        """The time of the calling thread. `now` is what the model thread read last."""
        if threading.current_thread().name != _MODEL_THREAD:
            return _REAL_CLOCK()
        self.now = time.thread_time() + self.slept
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread().name != _MODEL_THREAD:
            _REAL_SLEEP(seconds)
            return
        self.slept += seconds * max(0.5, self._chance.gauss(1, self._noise)) if seconds > 0 else seconds

    def _time(self) -> float:
        """For the oracle's log."""
        return self.seconds() if threading.current_thread().name == _MODEL_THREAD else _REAL_TIME()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The oracle, the loops that decode, measuring and the scheduler go by this clock."""
        scheduling = SimpleNamespace(monotonic=self.seconds, sleep=self.sleep)
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, {"ORACLE_CLOCK": "virtual"}))
            stack.enter_context(patch("time.perf_counter", self.seconds))
            stack.enter_context(patch("time.time", self._time))
            stack.enter_context(patch("time.sleep", self.sleep))
            stack.enter_context(patch("start_llm.engine.runtime.time", scheduling))
            stack.enter_context(patch.object(drafting, "measuring", partial(drafting.measuring, clock=self.seconds)))
            stack.enter_context(patch.object(drafting, "_build", _timed(drafting._build)))
            stack.enter_context(patch.object(drafting.Drafts, "begin", self._beginning(drafting.Drafts.begin)))
            yield

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
