"""`tests.stress.forgetful` on a clock that another process may put forward, by what it writes into the file `SHIFT`.

So a week of pauses takes no time. What waits for a lock or a socket waits by the real clock.
"""

from __future__ import annotations

import concurrent.futures.thread  # the modules that wait by a clock take the real one
import mmap
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

assert concurrent.futures.thread and queue and subprocess and threading

SHIFT = "START_LLM_SHIFT"
_SECONDS = struct.Struct("d")


class Shift:
    """Seconds by which the clock is ahead, in a file that the processes share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_SECONDS.pack(0.0))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SECONDS.size)

    @property
    def seconds(self) -> float:
        return float(_SECONDS.unpack(self._shared[:])[0])

    def add(self, seconds: float) -> None:
        self._shared[:] = _SECONDS.pack(self.seconds + seconds)


def shift_clocks(shift: Shift) -> None:
    """`time.time` and `time.monotonic` of this process."""

    def ahead(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + shift.seconds

    time.time, time.monotonic = ahead(time.time), ahead(time.monotonic)


if __name__ == "__main__":
    shift_clocks(Shift(Path(os.environ[SHIFT])))
    from tests.stress.forgetful import forget  # all of it reads the clocks as they are now

    sys.exit(forget())
