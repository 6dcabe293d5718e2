"""An agent's days on one server: a PI-like client and two more beside it, with cancels and restarts. What grows?

Rounds: in each, a PI-like agent has a turn (chat completions, tools, a stream), a second client has one in Messages and
leaves every third of its answers half-way, and a small question with no conversation comes. Between two rounds is a
pause. The server is ended and started again three times. Memory, files, threads, arrays and folders are looked at
behind each round, and compared early and late; every answer that is none is an error.

usage: python3.12 install_and_run.py run scripts/days.py [--minutes 120] [--model DIR] [--budget BYTES]
       python3.12 install_and_run.py run scripts/days.py --week [--rounds N]

With `--minutes` rounds follow each other for so long; without `--model` on the embedded model. With `--week` the oracle
serves, with a hundredth of what the server remembers beside KV, and pauses take no time: the server's clock is put
forward, some minutes by day and nine hours by night, seven days in all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conftest import embedded_model
from tests.integration.processes import healthy, process
from tests.oracle import build_oracle
from tests.stress.shifted import SHIFT, Shift

DAY = 86_400.0
NIGHT = 9 * 3600.0
RESTARTS = 3
TURNS = 12  # of a conversation; then the client begins another one
WAIT = 1200.0  # seconds without a byte
EARLY, LATE = (1 / 6, 1 / 4), (11 / 12, 1.0)  # parts of the time whose memory is compared: minute 20 and 120
MOST_GROWTH = 0.03
Json = dict[str, Any]
_WORDS = [a + b for a in ("fa", "ki", "lo", "mu", "re") for b in ("ban", "dor", "gel", "nis", "pat", "tul")]
_TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@dataclass
class Seen:
    """What the clients got. `errors`: in words. `computed`, `new`: tokens of the PI-like client's prompts."""

    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    computed: int = 0
    new: int = 0


@dataclass(frozen=True)
class Look:
    """Of the server, behind a round. `at`: part of the time that has passed. `life`: which process of the server."""

    at: float
    life: int
    memory: int
    files: int
    threads: int
    arrays: int
    kv: int  # bytes on disk
    rest: int  # bytes of all other files of the server, logs too


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_WORDS, k=count))


class Pi:
    """Chat completions with tools, one conversation after the other."""

    def __init__(self, url: str, seen: Seen, most: int) -> None:
        self.url, self._seen, self._most = url, seen, most
        self._chance, self._messages = random.Random(1), list[Json]()
        tool = {"name": "read", "description": "Reads a file.", "parameters": _TOOL}
        self._tools = [{"type": "function", "function": tool}]

    def turn(self) -> None:
        if len(self._messages) > 2 * TURNS:
            self._messages.clear()
        if not self._messages:
            self._messages = [{"role": "system", "content": "You work on a project. " + words(self._chance, 150)}]
        self._messages.append({"role": "user", "content": words(self._chance, 25)})
        body = {"messages": self._messages, "tools": self._tools, "max_tokens": self._most}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, usage = "", Json()
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=WAIT) as answer:
            if answer.status_code != 200:
                raise ValueError(f"PI: {answer.status_code} {answer.read()[:300]!r}")
            for event in events(answer):
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                usage = event.get("usage") or usage
                if "error" in event:
                    raise ValueError(f"PI: {event}")
        self._messages.append({"role": "assistant", "content": text or "Done."})
        report = usage.get("start_llm", {})
        self._seen.computed += report.get("computed", 0)
        self._seen.new += report.get("new", 0)


class Leaver:
    """Messages; leaves every third answer half-way."""

    def __init__(self, url: str, seen: Seen, most: int) -> None:
        self.url, self._seen, self._most = url, seen, most
        self._chance, self._messages, self._turn = random.Random(2), list[Json](), 0

    def turn(self) -> None:
        self._turn += 1
        if self._turn % TURNS == 1:
            self._messages = []
        asked = {"role": "user", "content": words(self._chance, 40)}
        body = {"model": "default", "messages": [*self._messages, asked], "stream": True, "max_tokens": self._most}
        text, pieces = "", 0
        with httpx.stream("POST", f"{self.url}/v1/messages", json=body, timeout=WAIT) as answer:
            if answer.status_code != 200:
                raise ValueError(f"Messages: {answer.status_code} {answer.read()[:300]!r}")
            for event in events(answer):
                if event["type"] == "error":
                    raise ValueError(f"Messages: {event}")
                piece = event.get("delta", {}).get("text", "") if event["type"] == "content_block_delta" else ""
                text, pieces = text + piece, pieces + bool(piece)
                if pieces > 2 and self._turn % 3 == 0:
                    self._seen.answers["left half-way"] += 1
                    return
        self._messages += [asked, {"role": "assistant", "content": text or "Done."}]


class Asker:
    """A small question with no conversation."""

    def __init__(self, url: str, seen: Seen) -> None:
        self.url, self._seen, self._chance = url, seen, random.Random(3)

    def turn(self) -> None:
        body = {"model": "default", "input": "A title for: " + words(self._chance, 40), "max_output_tokens": 8}
        answer = httpx.post(f"{self.url}/v1/responses", json=body, timeout=WAIT)
        if answer.status_code != 200:
            raise ValueError(f"question: {answer.status_code} {answer.text[:300]}")


def events(answer: httpx.Response) -> Iterator[Json]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it has gone
            total += path.stat().st_size
    return total


class Days:
    """`folder`: of the server. `passed`: what part of the time. `pause`: between two rounds."""

    def __init__(self, model: Path, folder: Path, passed: Callable[[], float], pause: Callable[[], None]) -> None:
        self._model, self._folder, self._passed, self._pause = model, folder, passed, pause
        self.seen, self.looks, self.rounds = Seen(), list[Look](), 0

    def run(self, most: int, program: str, **environment: str) -> None:
        """`most`: tokens of an answer."""
        clients = (Pi("", self.seen, most), Leaver("", self.seen, most), Asker("", self.seen))
        for life in range(RESTARTS + 1):
            with self._server(program, environment) as (url, server), ThreadPoolExecutor(len(clients)) as threads:
                for client in clients:
                    client.url = url
                while self._passed() < (life + 1) / (RESTARTS + 1):
                    list(threads.map(self._turn, clients))
                    self.looks.append(self._look(life, url, server))
                    self.rounds += 1
                    self._pause()

    @contextmanager
    def _server(self, program: str, environment: dict[str, str]) -> Iterator[tuple[str, psutil.Process]]:
        environment = {"REANCHOR": "on", **environment}
        with process(self._model, self._folder, ready=False, program=program, **environment) as (url, child):
            while not healthy(url) and child.poll() is None:  # a large model is read for minutes
                time.sleep(0.2)
            yield url, psutil.Process(child.pid)
            child.terminate()
            if code := child.wait(WAIT):
                self.seen.errors.append(f"the server ended with {code}")

    def _turn(self, client: Pi | Leaver | Asker) -> None:
        name = type(client).__name__
        try:
            client.turn()
            self.seen.answers[name] += 1
        except (ValueError, KeyError, httpx.HTTPError) as error:
            self.seen.errors.append(f"{name}: {error!r}")

    def _look(self, life: int, url: str, server: psutil.Process) -> Look:
        found = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        (arrays,) = [int(float(line.split()[1])) for line in found if line.startswith("start_llm_kv_arrays ")]
        kv, rest = folder_bytes(self._folder / "kv"), folder_bytes(self._folder)
        rss, files, threads = server.memory_info().rss, server.num_fds(), server.num_threads()
        return Look(self._passed(), life, rss, files, threads, arrays, kv, rest - kv)

    def _memories(self, low: float, high: float) -> list[int]:
        return [look.memory for look in self.looks if low <= look.at <= high]

    def growth(self) -> tuple[float, float, float]:
        """MiB early and late, and the growth between."""
        early, late = (statistics.median(self._memories(*part) or [0]) / 2**20 for part in (EARLY, LATE))
        return early, late, late / early - 1 if early else 0.0

    def faults(self) -> list[str]:
        """Everything that must not be, in words."""
        quarter = max(len(self.looks) // 4, 1)
        first, last = self.looks[:quarter], self.looks[-quarter:]
        found = list(self.seen.errors)
        if not all(self._memories(*part) for part in (EARLY, LATE)):
            found.append("memory was not looked at early and late: it takes more rounds")
        if self.growth()[2] > MOST_GROWTH:
            found.append(f"memory grew by {self.growth()[2]:.1%}")
        for name in ("files", "threads"):
            before, after = (max(getattr(look, name) for look in part) for part in (first, last))
            if after > before + 3:
                found.append(f"{name}: {before} at first, {after} at last")
        return found

    def text(self) -> str:
        early, late, growth = self.growth()
        last = self.looks[-1]
        most = {name: max(getattr(look, name) for look in self.looks) for name in ("files", "threads", "arrays", "kv")}
        told = {
            "rounds": self.rounds,
            "answers": self.seen.answers,
            "PI: computed / new": round(self.seen.computed / max(self.seen.new, 1), 3),
            "MiB early, late": [round(early, 1), round(late, 1), f"{growth:+.1%}"],
            "most at once": most,
            "bytes of other files at last": last.rest,
            "faults": self.faults(),
        }
        return json.dumps(told, indent=1)


def served(folder: Path) -> Path:
    (folder / "server").mkdir()
    return folder / "server"


def week(folder: Path, rounds: int) -> Days:
    """Seven days on the oracle; `rounds` a day."""
    shift, chance = Shift(folder / "shift"), random.Random(4)
    pause = (DAY - NIGHT) / rounds
    done = Counter[str]()

    def sleep() -> None:
        done["rounds"] += 1
        shift.add(pause * chance.uniform(0.2, 1.8) + (NIGHT if done["rounds"] % rounds == 0 else 0.0))

    model = build_oracle(folder / "model", "hybrid")
    days = Days(model, served(folder), lambda: done["rounds"] / (7 * rounds), sleep)
    variables = {"CACHE_MEMORY_BYTES": str(2 << 20), "KV_DISK_BYTES": str(32 << 20), "ORACLE_FORGETS": "1"}
    days.run(40, "tests.stress.shifted", **variables, **{SHIFT: str(folder / "shift")})
    return days


def real(folder: Path, model: Path, minutes: float, budget: int) -> Days:
    began = time.monotonic()
    days = Days(model, served(folder), lambda: (time.monotonic() - began) / (minutes * 60), lambda: None)
    days.run(24, "start_llm", CACHE_MEMORY_BYTES=str(budget), KV_DISK_BYTES=str(4 * budget))
    return days


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint's folder; default: the embedded model")
    parser.add_argument("--budget", type=int, default=256 << 20, help="bytes of stored KV, so that it is full early")
    parser.add_argument("--week", action="store_true")
    parser.add_argument("--rounds", type=int, default=60, help="with --week: a day")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.week:
            days = week(Path(folder), options.rounds)
        else:
            days = real(Path(folder), options.model or embedded_model(), options.minutes, options.budget)
    print(days.text())
    return 1 if days.faults() else 0


if __name__ == "__main__":
    raise SystemExit(main())
