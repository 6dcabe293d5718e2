"""Progress of long steps (a download, a conversion, a model load) on the terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 5.0


class ProgressBars:
    """Called with a step's name and the part of it that is done, 0 to 1, from any thread.

    A bar per step on a terminal; elsewhere, and where `say` is given, a line now and then.
    """

    def __init__(self, console: Console, say: Callable[[str], None] | None = None) -> None:
        self._console = console
        self._bars_wanted = say is None and console.is_terminal
        self._say = say or (lambda line: console.print(line, markup=False))
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._running: set[str] = set()
        self._bars: Progress | None = None
        self._told = 0.0

    def __call__(self, step: str, part: float) -> None:
        with self._lock:
            begins, ends = step not in self._running, part >= 1.0
            if begins:
                self._running.add(step)
            if ends:
                self._running.discard(step)
            if self._bars_wanted:
                self._draw(step, part)
            elif ends:
                self._say(f"{step}: done")
            elif begins:
                self._say(f"{step} ...")
                self._told = time.monotonic()
            elif time.monotonic() - self._told >= LINE_SECONDS:
                self._say(f"{step}: {part:.0%}")
                self._told = time.monotonic()

    def close(self) -> None:
        """Gives the terminal back in the middle of a step."""
        with self._lock:
            self._bars_wanted = False
            if self._bars is not None:
                self._bars.stop()

    def _draw(self, step: str, part: float) -> None:
        if self._bars is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
            )
            self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
            self._bars.start()
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=1.0)
        self._bars.update(self._tasks[step], completed=part)
        if not self._running:
            self._bars.stop()
            self._bars, self._tasks = None, {}
