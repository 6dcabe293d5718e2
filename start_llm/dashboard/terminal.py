"""What the terminal shows of requests: rows that move and lines of text, or JSON lines."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from start_llm.core.events import Event, FirstToken, Progress, ReasoningDelta, Started, TextDelta, ToolCallDelta
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.dashboard.process_log import log_to_stderr
from start_llm.dashboard.request_log import log_entry
from start_llm.dashboard.tables import words_only

PROGRESS_SECONDS = 10.0
"""Between two plain lines of one long prefill."""


@dataclass(slots=True)
class RequestLine:
    """One request as it goes: when it arrived, when its `state` began (monotonic seconds), tokens of its prompt, and
    `pieces`: parts of the answer so far, about a token each.
    """

    request: ChatRequest
    began: float
    since: float
    state: str = "queued"
    done: int = 0
    total: int = 0
    reused: int = 0
    pieces: int = 0

    def see(self, event: Event, now: float) -> None:
        if isinstance(event, Started) and self.state != "answer":
            self.state = "prefill"
            self.since = now
            self.total = event.report.prompt
            self.done = self.reused = event.report.reused
        elif isinstance(event, Progress):
            if event.total and self.state != "answer":
                self.state = "prefill"
                self.done = event.done
                self.total = event.total
        elif isinstance(event, FirstToken | TextDelta | ReasoningDelta | ToolCallDelta):
            if self.state != "answer":
                self.state, self.since = "answer", now
            self.pieces += not isinstance(event, FirstToken)

    def rate(self, now: float) -> float:
        """Tokens of the prompt or pieces of the answer in a second; 0 where nothing is known yet."""
        work = {"prefill": self.done - self.reused, "answer": self.pieces}.get(self.state, 0)
        return work / max(now - self.since, 1e-6)

    def seconds_left(self, now: float) -> float | None:
        """Of the prefill; ``None`` where that is not known."""
        rate = self.rate(now)
        return (self.total - self.done) / rate if self.state == "prefill" and rate > 0 else None

    def line(self, now: float) -> str:
        """Time so far, done and to do, rate, time left."""
        return f"{row_name(self.request)}  {span(now - self.began)}  {self._doing(now)}"

    def _doing(self, now: float) -> str:
        if self.state == "queued":
            return "waiting"
        if self.state == "prefill":
            share = self.done / self.total if self.total else 0.0
            line = f"prefill {self.done:,}/{self.total:,} ({share:.0%}), {self.reused:,} reused"
            left = self.seconds_left(now)
            return line if left is None else f"{line}, {self.rate(now):,.0f} token/s, {span(left)} left"
        if not self.pieces:  # an answer that is sent as a whole
            return f"answering since {span(now - self.since)}"
        return f"answer {self.pieces:,} pieces, {self.rate(now):,.1f}/s"


class RequestLines(Observer):
    """Keeps a line for each request that runs. Thread-safe: lines change while `_changed` is held."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, RequestLine] = {}
        self._changed = threading.Condition()
        self._version = 0

    def started(self, request: ChatRequest) -> None:
        with self._changed:
            now = self._clock()
            self._rows[request.id] = RequestLine(request, now, now)
            self.nudge()

    def event(self, request: ChatRequest, event: Event) -> None:
        with self._changed:
            row = self._rows.get(request.id)
            if row is not None:
                row.see(event, self._clock())
            self.nudge()

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._changed:
            self._rows.pop(request.id, None)
            self.nudge()

    def nudge(self) -> None:
        """Wakes who waits for news."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()


def span(seconds: float) -> str:
    """A time in whole seconds; minutes and hours where there are some."""
    minutes, left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{left:02} h"
    return f"{minutes}:{left:02} min" if minutes else f"{left} s"


def row_name(request: ChatRequest) -> str:
    """Dialect and the id's end: enough to find the request in the log."""
    return f"{request.dialect:<11} {request.id[-6:]}"


def summary(request: ChatRequest, outcome: Outcome) -> str:
    """One line for a request that has ended."""
    line = f"{row_name(request)}  {outcome.status}"
    report = outcome.report or CacheReport()
    if outcome.report is not None:
        line += (
            f"  prompt {report.prompt:,}, reused {report.reused:,}, computed {report.computed:,}, new {report.new:,}"
        )
    if outcome.usage is not None:
        line += f", answer {outcome.usage.completion:,}"
    if outcome.seconds_first is not None:
        line += f"  first token {outcome.seconds_first:.2f} s"
    line += f"  {outcome.seconds:.2f} s"
    if report.miss is not None:
        line += f"  miss: {report.miss.detail or report.miss.reason}"
        line += f"; {report.miss.remedy}" if report.miss.remedy else ""
    return words_only(line if outcome.error is None else f"{line}  {outcome.error}")


class LiveRows:
    """Rows at the bottom of a terminal that are drawn anew: bars, requests. Any thread. There is one for a terminal.

    Without rows nothing is drawn, and no thread runs. `live`: the console is a terminal that can do it.
    """

    def __init__(self, console: Console | None) -> None:
        self.live = console is not None and console.is_terminal and not console.is_dumb_terminal
        self._console = console
        self._rows: dict[str, Callable[[], RenderableType]] = {}
        self._drawn: Live | None = None
        self._lock = threading.RLock()

    def show(self, name: str, row: Callable[[], RenderableType] | None) -> None:
        """`row` is called on rich's thread; ``None``: it goes."""
        with self._lock:
            if row is not None and self.live:
                self._rows[name] = row
            else:
                self._rows.pop(name, None)
            if self._rows and self._drawn is None:
                logged = sys.stderr.isatty()  # its lines go above then; a file gets them as they are
                self._drawn = Live(
                    console=self._console, get_renderable=self._all, transient=True, redirect_stderr=logged
                )
                self._drawn.start()
            elif self._drawn is not None and not self._rows:
                self._drawn.stop()
                self._drawn = None

    def close(self) -> None:
        """Gives the terminal back, in the middle of a step, too."""
        with self._lock:
            self.live = False
            for name in list(self._rows):
                self.show(name, None)

    def _all(self) -> Group:
        """On rich's thread, which must not wait for the lock: `Live.stop` waits for it."""
        return Group(*(row() for row in list(self._rows.values())))


class TextLines(RequestLines):
    """A line per request that has ended. Before that `rows` has a row of it that moves; where there are no such rows, a
    line is written now and then for a long prefill."""

    def __init__(
        self, write: Callable[[str], None], live: LiveRows, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._write, self._live = write, live
        self._written: dict[str, float] = {}

    def started(self, request: ChatRequest) -> None:
        super().started(request)
        row = self._rows[request.id]
        self._live.show(request.id, lambda: Text(row.line(self._clock()), no_wrap=True, overflow="ellipsis"))

    def event(self, request: ChatRequest, event: Event) -> None:
        super().event(request, event)
        row, now = self._rows.get(request.id), self._clock()
        if row is None or self._live.live or not isinstance(event, Progress):
            return
        if now - self._written.get(request.id, row.began) >= PROGRESS_SECONDS:
            self._written[request.id] = now
            self._write(row.line(now))

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        super().ended(request, outcome)
        self._written.pop(request.id, None)
        self._live.show(request.id, None)
        self._write(summary(request, outcome))


class JsonLines(Observer):
    """Writes the log's entries, one JSON object a line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        self._write(json.dumps(log_entry(request, outcome, datetime.now(UTC)), ensure_ascii=False))


class LastingStream:
    """A stream that may lose its reader (``serve | head``, a full disk): what cannot be written then is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # for good, and what is buffered must not fail once more at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except OSError:
            pass  # not logged: the log may go to the same terminal


def make_console(*, stderr: bool) -> Console:
    """The console of the process, plain text only: nothing in it is markup."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # of stdout: signs that the terminal's encoding lacks
    # With FORCE_COLOR a file were a terminal, and got keys and rows that move.
    file, terminal = cast(IO[str], LastingStream(stream)), None if stream.isatty() else False
    return Console(file=file, force_terminal=terminal, highlight=False, soft_wrap=True, emoji=False)


class _Lines(logging.Formatter):
    """Records as lines of text. What clients, models and other servers say in them moves no cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return words_only(super().format(record))


def log_as_lines(level: str = "warning") -> None:
    """Sends the process's log, from `level` on, to stderr."""
    log_to_stderr(_Lines("%(levelname)s %(name)s: %(message)s"), level)


def terminal(settings: Settings, console: Console, live: LiveRows) -> Observer:
    """The right one of these for ``LOG_JSON``."""
    write = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    return JsonLines(write) if settings.log_json else TextLines(write, live)
