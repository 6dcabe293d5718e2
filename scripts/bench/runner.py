"""Runs scenarios against one server and keeps the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.agent import Json
from scripts.bench.client import Client, Reply
from scripts.bench.counting import NewTokens, assistant_units, request_units
from scripts.bench.scenarios import SCENARIOS, Skipped
from scripts.bench.servers import Server
from tests.oracle.log import mark, work_done

UNEXPLAINED = 80  # a note of some lines has up to 70 tokens
SETTLE_SECONDS = 2.0  # a crash comes some time after an answer, not in the same instant


@dataclass(frozen=True)
class Row:
    """One request. `computed` is ``None`` where work cannot be told apart (requests in parallel, no oracle log)."""

    new: int
    computed: int | None
    seconds_to_first: float
    wrong: str | None
    report: Json | None

    @property
    def unexplained(self) -> bool:
        """The server computed more than was new, by its own count or by ours, and gave no reason."""
        if self.report is None or self.report.get("miss"):
            return False
        own = int(self.report.get("computed", 0)) - int(self.report.get("new", 0))
        ours = 0 if self.computed is None else self.computed - self.new
        return max(own, ours) > UNEXPLAINED


@dataclass
class Result:
    """One scenario. `computed` is all that went through the model from its first request to its last, or ``None``."""

    name: str
    rows: list[Row] = field(default_factory=list)
    computed: int | None = None
    skipped: str | None = None

    @property
    def new(self) -> int:
        return sum(row.new for row in self.rows)

    @property
    def ratio(self) -> float | None:
        return None if self.computed is None or not self.new else self.computed / self.new

    @property
    def wrong(self) -> list[str]:
        return [row.wrong for row in self.rows if row.wrong]

    @property
    def unexplained(self) -> int:
        return sum(row.unexplained for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                "new": row.new,
                "computed": row.computed,
                "seconds_to_first": round(row.seconds_to_first, 4),
                "wrong": row.wrong,
                "report": row.report,
            }
            for row in self.rows
        ]
        return {
            "scenario": self.name,
            "skipped": self.skipped,
            "requests": len(self.rows),
            "new": self.new,
            "computed": self.computed,
            "ratio": self.ratio,
            "wrong": self.wrong,
            "unexplained": self.unexplained,
            "rows": rows,
        }


class Run:
    """One scenario's run: asks, checks, counts. Implements `scenarios.Bench`; `ask` may be called from any thread."""

    def __init__(self, name: str, server: Server, count: Callable[[str], int], nonce: str, pause: float = 0.0) -> None:
        self.seed = f"{name}-{nonce}"
        self.server = server
        self.client = Client(server.url, server.model, server.key)
        self.log: Path | None = server.log
        self.books = NewTokens(count)
        self.pause = pause
        self.result = Result(name)
        self._lock = threading.Lock()
        self._running = 0
        self._overlapped = False

    def restart(self) -> None:
        if self.server.restart is None:
            raise Skipped("this server cannot be restarted from here (--restart-command)")
        time.sleep(SETTLE_SECONDS)
        self.server.restart()

    def ask(self, messages: list[Json], tools: list[Json], wrong: Callable[[Reply], str | None]) -> Reply:
        if self.pause:
            time.sleep(self.pause)
        units = request_units(messages, tools)
        with self._lock:
            self._running += 1
            self._overlapped = self._running > 1
            new = self.books.new(units)
            before = mark(self.log) if self.log else 0
        body: Json = {"messages": messages, "max_tokens": 4096, "temperature": 0}
        if tools:
            body["tools"] = tools
        reply = self.client.ask(body)
        with self._lock:
            self._running -= 1
            computed = None if self.log is None or self._overlapped else work_done(self.log, before)
            self._overlapped = self._running > 0
            calls = [(call.name, call.arguments) for call in reply.calls]
            self.books.add(units, assistant_units(reply.content, reply.reasoning, calls))
            self.result.rows.append(Row(new, computed, reply.seconds_to_first, wrong(reply), reply.report))
        return reply


def run_scenario(name: str, server: Server, count: Callable[[str], int], nonce: str, pause: float = 0.0) -> Result:
    """Runs the scenario called `name`; `count` gives a text's tokens, `nonce` makes its texts new to the server."""
    run = Run(name, server, count, nonce, pause)
    before = mark(server.log) if server.log else 0
    try:
        SCENARIOS[name](run)
    except Skipped as reason:
        run.result.skipped = str(reason)
    if server.log:
        run.result.computed = work_done(server.log, before)
    return run.result
