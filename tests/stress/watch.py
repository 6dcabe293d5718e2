"""What is measured from outside while the clients storm: /health, memory, descriptors."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
QUIET_SECONDS = 0.005
PROBE = """
import glob, json, socket, sys, time
port, seconds, server = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
request = b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n"
took, worked, late, wrong, end = [], [], [], [], time.monotonic() + seconds
def busy():
    found = {}
    for path in glob.glob(f"/proc/{server}/task/*/schedstat"):
        try:
            with open(path) as file:
                found[path] = int(file.read().split()[0]) / 1e9
        except OSError:
            continue
    return found
while time.monotonic() < end:
    began = time.perf_counter()
    time.sleep(0.02)
    late.append(time.perf_counter() - began - 0.02)
    before = busy()
    asked = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(request)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        if b" 200 " not in answer[:20]:
            wrong.append(answer[:200].decode("latin-1"))
    except OSError as error:
        wrong.append(repr(error))
    took.append(time.perf_counter() - asked)
    worked.append(sum(max(0.0, spent - before.get(path, 0.0)) for path, spent in busy().items()))
print(json.dumps({"took": took, "worked": worked, "late": late, "wrong": wrong[:20]}))
"""
"""A process of its own: it must not wait for the clients that it shares a machine with."""


@dataclass
class Samples:
    """Of the server, at equal distances: resident bytes, open descriptors, threads."""

    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class Sampler:
    """Samples `process` while inside."""

    def __init__(self, process_id: int, every: float = 1.0) -> None:
        self.samples = Samples()
        self._process = psutil.Process(process_id)
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Samples:
        self._thread.start()
        return self.samples

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._every):
            with self._process.oneshot():
                self.samples.memory.append(self._process.memory_info().rss)
                self.samples.descriptors.append(self._process.num_fds())
                self.samples.threads.append(self._process.num_threads())


@dataclass(frozen=True)
class Health:
    """
    Attributes:
        took: seconds of each question.
        worked: seconds that the server's threads computed meanwhile, added up; 0 where the system does not tell (it is
            Linux that does).
        late: seconds that the machine woke the asker too late before each: how busy it is by itself.
        wrong: answers that were none.
    """

    took: list[float]
    worked: list[float]
    late: list[float]
    wrong: list[str]

    @property
    def p99(self) -> float:
        return quantile(self.took, 99)

    @property
    def ours(self) -> float:
        """The 99th percentile of what can be the server's own doing: an answer that waits while the server gets no
        core waits for the neighbours.

        Too much, if anything: threads that compute side by side count each. A server that sleeps instead of answering
        is seen in `p99` only, and that is the figure that counts on a quiet machine.
        """
        return quantile([min(took, worked) for took, worked in zip(self.took, self.worked, strict=True)], 99)

    def is_within(self, seconds: float) -> bool:
        """On a busy machine only what is the server's own doing is held against it."""
        return (self.p99 if self.machine_is_quiet else self.ours) < seconds

    @property
    def machine_is_quiet(self) -> bool:
        """Else an answer waits for the machine, once for each thread that it passes and each turn of Python's lock."""
        return quantile(self.late, 99) < QUIET_SECONDS


class HealthProbe:
    """Asks the /health of a process for `seconds`, some 20 to 40 times a second; `result` waits for its end."""

    def __init__(self, port: int, process_id: int, seconds: float) -> None:
        command = [sys.executable, "-c", PROBE, str(port), str(seconds), str(process_id)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def result(self) -> Health:
        said, _ = self._process.communicate(timeout=120)
        return Health(**json.loads(said))


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def growth(values: list[int]) -> float:
    """How much more there is in the last quarter than in the one before, by their medians; 0.1 is a tenth."""
    quarter = len(values) // 4
    before, last = statistics.median(values[-2 * quarter : -quarter]), statistics.median(values[-quarter:])
    return last / before - 1


def until_at_rest(port: int, seconds: float = 60.0) -> dict[str, float]:
    """Waits until nothing runs or waits. The figures of /metrics."""
    end = time.monotonic() + seconds
    while True:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        lines = (line.split() for line in text.splitlines() if line.startswith("start_llm_") and "{" not in line)
        figures = {name.removeprefix("start_llm_"): float(value) for name, value in lines}
        busy = figures["engine_running"] + figures["engine_queued"] + figures["requests_active"]
        if busy == 0 or time.monotonic() > end:
            return figures
        time.sleep(0.2)
