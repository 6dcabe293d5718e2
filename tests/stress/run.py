"""One storm on a server of its own, and what came of it."""

from __future__ import annotations

import asyncio
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.integration.processes import process
from tests.stress.load import ANSWER_SECONDS, CHAT, Tally, say, storm
from tests.stress.watch import Health, HealthProbe, Sampler, Samples, growth, quantile, until_at_rest

SETTINGS = {"CACHE_MEMORY_BYTES": str(8 << 20), "KV_DISK_BYTES": str(256 << 20), "MAX_KV_SIZE": "8192"}
"""Small, so that what is bounded is full in the first half."""


LONG = {"CACHE_MEMORY_BYTES": str(2 << 20), "KV_DISK_BYTES": str(32 << 20), "ORACLE_FORGETS": "1"}
"""For hours: what is bounded is full after ten minutes."""


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        health: seconds that /health may take (p99); beside busy neighbours, what of it is the server's doing.
        memory, descriptors: how much they may grow from the third quarter to the last; 0.1 is a tenth.
    """

    health: float = 0.2
    memory: float = 0.05
    descriptors: float = 0.15


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        left: figures of /metrics when the storm was over.
        after: the status of one more question then.
        said: the server's output.
    """

    tally: Tally
    health: Health
    samples: Samples
    left: dict[str, float]
    after: int
    said: str

    def faults(self, limits: Limits = Limits()) -> list[str]:
        """Everything that must not be, in words."""
        found = [*self.tally.wrong, *(f"/health: {answer}" for answer in self.health.wrong)]
        if not any(self.tally.statuses[what] for what in ANSWERED):
            found.append("no question was answered")  # 429 and 503 are fine, but not for everybody
        if self.after != 200:
            found.append(f"a question afterwards has status {self.after}")
        if not self.health.is_within(limits.health):
            took = f"/health took {self.health.p99:.3f} s (p99), {self.health.ours:.3f} by our doing"
            found.append(f"{took}; {limits.health:.3f} are allowed")
        for name, values, most in (
            ("memory", self.samples.memory, limits.memory),
            ("descriptors", self.samples.descriptors, limits.descriptors),
        ):
            if growth(values) > most:
                found.append(f"{name} grew by {growth(values):.1%} from the third quarter to the last")
        found += [f"{name} is {self.left[name]:.0f} afterwards" for name in AT_REST if self.left[name] > 0]
        if "Traceback" in self.said:
            found.append("the log: " + self.said[self.said.index("Traceback") :][:2000])
        return found

    def text(self) -> str:
        memory, descriptors, threads = self.samples.memory, self.samples.descriptors, self.samples.threads
        half = len(memory) // 2
        shown = {
            "statuses": dict(sorted(self.tally.statuses.items())),
            "health, p99, by our doing, and how late the machine is": [
                *(self.health.p99, self.health.ours, quantile(self.health.late, 99))
            ],
            "most in the second half": [max(values[half:]) for values in (memory, descriptors, threads)],
            "growth from the third quarter to the last": [growth(memory), growth(descriptors)],
            "a question afterwards": self.after,
            "left": self.left,
            "faults": self.faults(),
        }
        return json.dumps(shown, indent=1)


ANSWERED = ("answer 200", "stream 200", "slow body 200")
AT_REST = ("engine_running", "engine_queued", "requests_active", "http_front_errors", "http_dropped")


def soak(model: Path, folder: Path, clients: int, minutes: int) -> list[float]:
    """Resident MiB of each minute, by their medians, of a server with small memories (`tests.stress.forgetful`)."""
    with (
        process(model, folder, program="tests.stress.forgetful", **SETTINGS | LONG) as (url, child),
        Sampler(child.pid, every=5) as samples,
    ):
        tally = asyncio.run(storm(int(url.rsplit(":", 1)[1]), clients, minutes * 60))
    print(json.dumps(tally.statuses), tally.wrong)
    memory = samples.memory
    return [statistics.median(memory[at : at + 12]) / 2**20 for at in range(0, len(memory) - 11, 12)]


def stress(model: Path, folder: Path, clients: int, seconds: float) -> Result:
    """`clients` for `seconds` on a server that runs `model`, with its files in `folder`."""
    with process(model, folder, ready=True, **SETTINGS) as (url, child):
        port = int(url.rsplit(":", 1)[1])
        probe = HealthProbe(port, child.pid, seconds)
        with Sampler(child.pid, every=min(1.0, seconds / 40)) as samples:
            tally = asyncio.run(storm(port, clients, seconds))
        health = probe.result()
        left = until_at_rest(port)
        after = httpx.post(url + CHAT, json=say("Hi") | {"max_tokens": 1}, timeout=ANSWER_SECONDS).status_code
    return Result(tally, health, samples, left, after, (folder / "said").read_text(errors="replace"))
