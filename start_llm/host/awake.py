"""Keeps the machine from going to sleep while requests are answered, and for some minutes behind them.

macOS has ``caffeinate`` for that, Linux ``systemd-inhibit``. The child ends with this process, however that ends. The
macOS part was tested with a stand-in only.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import psutil

log = logging.getLogger(__name__)

BEHIND_SECONDS = 300.0  # an agent's next request comes while its tools run
LOOK_SECONDS = 5.0
LEAST_BATTERY = 20.0  # percent; below it a laptop without a plug may sleep
CHILDREN = frozenset({"caffeinate", "systemd-inhibit"})


def holder(system: str, pid: int) -> list[str]:
    """What holds the machine awake while it runs, until process `pid` has ended; empty where the system has nothing."""
    if system == "darwin":
        return ["caffeinate", "-i", "-w", str(pid)]
    inhibit = ["systemd-inhibit", "--what=sleep:idle", "--who=start_llm", "--why=requests are answered", "--mode=block"]
    return [*inhibit, "tail", f"--pid={pid}", "-f", "/dev/null"] if system == "linux" else []


def battery_is_low() -> bool:
    """Without a plug, and nearly empty."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return False
    return battery is not None and battery.power_plugged is False and battery.percent < LEAST_BATTERY


class Awake:
    """Looks from time to time whether there is work, on a thread of its own."""

    def __init__(
        self,
        idle_seconds: Callable[[], float],
        command: Sequence[str] | None = None,
        is_low: Callable[[], bool] = battery_is_low,
    ) -> None:
        """`idle_seconds`: since the last request; 0 while one is open. `command`: see `holder`."""
        self._idle, self._is_low = idle_seconds, is_low
        self._command = list(holder(sys.platform, os.getpid()) if command is None else command)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does nothing where the system has no such command."""
        if self._command and shutil.which(self._command[0]):
            threading.Thread(target=self._run, name="awake", daemon=True).start()

    def _run(self) -> None:
        stopped = threading.Event()
        while self.look():
            stopped.wait(LOOK_SECONDS)

    def look(self) -> bool:
        """Takes hold, or lets go. False: the command ended by itself, so it is of no use here."""
        child = self._child
        wanted = self._idle() < BEHIND_SECONDS and not self._is_low()
        if child is not None and child.poll() is not None:
            log.info("%s ended with %d: the machine may sleep while requests run", self._command[0], child.returncode)
            return False
        if wanted and child is None:
            nothing = subprocess.DEVNULL
            try:
                self._child = subprocess.Popen(self._command, stdin=nothing, stdout=nothing, stderr=nothing)
            except OSError as error:
                log.warning("%s cannot be started: %s", self._command[0], error)
                return False
        elif child is not None and not wanted:
            child.terminate()
            child.wait()
            self._child = None
        return True
