"""Progress of long steps (a download, a conversion, a model load): bars on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from start_llm.dashboard.tables import words_only
from start_llm.dashboard.terminal import LiveRows, span

LINE_SECONDS = 5.0


class ProgressLines:
    """Called with a step's name and the part of it that is done (see `models.background.Progress`) from any thread.

    `rows` has a bar for each step that runs. `say` gets the ends, and without bars a line now and then.
    """

    def __init__(self, say: Callable[[str], None], rows: LiveRows) -> None:
        self._say, self._rows = say, rows
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}  # when it began
        self._told = 0.0

    def __call__(self, step: str, part: float) -> None:
        step = words_only(step)  # a model's folder may be named with escape codes
        with self._lock:
            begins, ends, now = step not in self._running, not 0.0 <= part < 1.0, time.monotonic()
            began = self._running.setdefault(step, now)
            self._rows.show(step, None if ends else partial(_bar, step, part, began))
            if ends:
                del self._running[step]
                self._say(f"{step}: {'done' if part >= 1.0 else 'failed'} ({span(now - began)})")
            elif not self._rows.live and (begins or now - self._told >= LINE_SECONDS):
                self._say(f"{step} ..." if begins else f"{step}: {part:.0%}")
                self._told = now


def _bar(step: str, part: float, began: float) -> Table:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(1.0, part, width=30, pulse=part == 0.0)  # it moves where nothing is known of the part
    row.add_row(bar, f"{part:4.0%}", Text(step), span(time.monotonic() - began))
    return row
