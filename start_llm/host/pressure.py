"""How short of memory the machine is: the system's own word, made steady.

macOS says it as a level (``kern.memorystatus_vm_pressure_level``, ``<sys/event.h>``: 1, 2 or 4). Linux has two figures:
what is available of all memory, and the share of time that programs waited for it (PSI, kernel's ``accounting/psi``).
The macOS part was tested with a stand-in only.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from start_llm.host.heap import trim_heaps

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
_TRIM_SECONDS = 60.0  # what a burst of requests took is not kept for long
STEADY_SECONDS = 10.0  # no change follows another one sooner, but for one to critical
_MAC_LEVEL = b"kern.memorystatus_vm_pressure_level"
_WARNING_SHARE, _CRITICAL_SHARE = 0.08, 0.03  # of memory that is available: below it
_MARGIN = 0.04  # more must be available before the level falls again
_WARNING_STALL, _CRITICAL_STALL = 10.0, 40.0  # percent of the last ten seconds that some program waited for memory


class Pressure(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """`level`: what the figures say. `calm`: what they say with a margin; the level falls to that."""

    level: Pressure
    calm: Pressure


def read_mac() -> Reading:
    """Raises OSError, AttributeError where the system has no such figure."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if ctypes.CDLL(None).sysctlbyname(_MAC_LEVEL, ctypes.byref(value), ctypes.byref(size), None, 0):
        raise OSError(f"{_MAC_LEVEL.decode()} cannot be read")
    return reading_of_level(value.value)


def reading_of_level(level: int) -> Reading:
    """`level`: macOS' number."""
    found = Pressure.CRITICAL if level >= 4 else Pressure.WARNING if level >= 2 else Pressure.NORMAL
    return Reading(found, found)


def read_linux(root: Path = Path("/")) -> Reading:
    """Of the machine, or of the control group where that has less left. Raises OSError, ValueError, KeyError."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    memory = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    available = min(memory["MemAvailable"] / memory["MemTotal"], _left_in_group(root / "sys/fs/cgroup"))
    stall = _stall(root / "proc/pressure/memory")
    return Reading(_level(available, stall), _level(available - _MARGIN, stall))


def _level(available: float, stall: float) -> Pressure:
    if available < _CRITICAL_SHARE or (stall >= _CRITICAL_STALL and available < 2 * _WARNING_SHARE):
        return Pressure.CRITICAL
    # Programs also wait for memory where a control group of another program is full: then this machine is not short.
    if available < _WARNING_SHARE or (stall >= _WARNING_STALL and available < 2 * _WARNING_SHARE):
        return Pressure.WARNING
    return Pressure.NORMAL


def _left_in_group(group: Path) -> float:
    """The share of the control group's limit (version 2) that can still be used; 1 without a limit."""
    try:
        most, used = (group / "memory.max").read_text("ascii"), (group / "memory.current").read_text("ascii")
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return 1 - (int(used) - int(stat.get("inactive_file", 0))) / int(most)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number: there is no limit
        return 1.0


def _stall(path: Path) -> float:
    try:
        some = path.read_text("ascii").splitlines()[0].split()
        return float(some[1].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):  # a kernel without PSI
        return 0.0


class SteadyLevel:
    """The level without flapping: it rises at once and falls when the figures are calm. Pure: the time is given."""

    def __init__(self) -> None:
        self.level = Pressure.NORMAL
        self._changed = float("-inf")

    def hear(self, reading: Reading, now: float) -> bool:
        """Whether the level is another one now. `now`: seconds on a clock that does not go back."""
        wanted = reading.level if reading.level > self.level else min(self.level, reading.calm)
        soon = now - self._changed < STEADY_SECONDS
        if wanted == self.level or (soon and (wanted < self.level or wanted < Pressure.CRITICAL)):
            return False
        self.level, self._changed = wanted, now
        return True


class MemoryWatch:
    """Looks at the machine twice a second, on a thread of its own, and lets the C library keep no free memory for long.

    `on_level` gets the level whenever it changes, and again at each look while it is not normal: whoever gives memory
    back does so in steps.
    """

    def __init__(self, on_level: Callable[[Pressure, bool], None], read: Callable[[], Reading] | None = None) -> None:
        """`on_level`: the level, and whether it has just changed. `read`: in place of the system's own word."""
        self._on_level = on_level
        self._read = read or (read_mac if sys.platform == "darwin" else read_linux)
        self._steady = SteadyLevel()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def start(self) -> None:
        """Does nothing where the system does not say how short of memory it is."""
        try:
            self._read()
        except (OSError, ValueError, KeyError, AttributeError):
            log.info("this system does not say how short of memory it is", exc_info=True)
            return
        self._thread.start()

    def stop(self) -> None:
        """May be called twice, and without `start`."""
        self._ended.set()

    def _run(self) -> None:
        trimmed = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            try:
                if time.monotonic() > trimmed + _TRIM_SECONDS:
                    trim_heaps()
                    trimmed = time.monotonic()
                changed = self._steady.hear(self._read(), time.monotonic())
                if changed or self._steady.level is not Pressure.NORMAL:
                    self._on_level(self._steady.level, changed)
            except Exception:  # the thread's edge: the next look may succeed
                log.warning("the machine's memory could not be looked at", exc_info=True)
