"""How an answer goes on beside a long prompt: its speed, its longest pause, and how much longer the prompt takes.

The whole server runs on the oracle, whose passes take as long as a large model's: 60 ms for a token, 60 ms x (1 + n/16)
for a chunk of n tokens. They take it on a clock of the model thread for which nobody waits (`bench/virtual`), and the
oracle's log has its times. An answer is streamed; after some tokens alone a prompt arrives beside it. Then a prompt
like it is computed alone.

With `--questions`: small questions of 800 tokens (10 tokens of an answer) come beside the prompt, so many a minute at
random times; with 0, one beside each prompt, at a random time. How long do they wait for their first token, and how
much longer does the prompt take? Here the scheduler runs alone, with a runner that only adds up times: 60 ms a pass and
`--token` seconds more for each prompt token (a 27B model of 4 bits at about 590 tokens a second).

usage: python3.12 install_and_run.py run scripts/bench_share.py [--tokens N] [--share SHARE]
       python3.12 install_and_run.py run scripts/bench_share.py --questions A_MINUTE [--tokens N] [--token SECONDS]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.drafted import serving
from scripts.bench.virtual import VirtualClock
from start_llm.core.events import EngineEvent, Sampled
from tests.engine.fakes import PASS, Collected, SlowRunner, scheduler_of, submit
from tests.oracle.build import build_oracle
from tests.oracle.log import LoggedPass, mark, passes

PASSES = f"{PASS} {PASS / 16} 0 0"
ALONE = 40  # tokens that the answer has said when the prompt arrives
QUESTION = 800  # tokens
SEEDS, ONE_EACH = 40, 400
SHARES = {"median": 0.5, "p95": 0.95}
QUIET = 1.0  # real seconds without a pass after which nothing runs any more
WAIT = 1800.0


@dataclass(frozen=True)
class Shared:
    """What an answer and a prompt beside it were measured to get.

    Attributes:
        prompt: tokens of the prompt that were computed.
        speed: of the answer beside the prompt, as a share of its speed alone.
        longer: seconds of the prompt, as a multiple of those that it takes alone.
        pause: the longest between two tokens of the answer, in seconds.
    """

    prompt: int
    speed: float
    longer: float
    pause: float


def words(count: int, seed: int) -> str:
    """So many, each of about 2.5 tokens. Nothing in it is worth a draft."""
    chance = random.Random(seed)
    return " ".join("".join(chance.choices("abcdefghij", k=3)) for _ in range(count))


class Answer(threading.Thread):
    """Streams an answer. `pieces`: that have come."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.pieces = 0
        self.over = threading.Event()

    def run(self) -> None:
        messages = [{"role": "user", "content": "go"}]
        body = {"messages": messages, "stream": True, "drafts": False, "max_tokens": 20_000}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=WAIT) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if self.over.is_set():
                    return
                self.pieces += line.startswith("data: {")


def ask(url: str, tokens: int, seed: int) -> None:
    """A prompt; its answer has one token."""
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": words(int(tokens / 2.5), seed)}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT).raise_for_status()


def prompt_passes(found: Sequence[LoggedPass]) -> list[LoggedPass]:
    """From a prompt's first chunk to its last."""
    chunks = [i for i, one in enumerate(found) if one.computed]
    return list(found[chunks[0] : chunks[-1] + 1])


def quiet(log: Path) -> int:
    """Waits until nothing is computed. Returns the log's length."""
    while True:
        length = mark(log)
        time.sleep(QUIET)
        if mark(log) == length:
            return length


def shared(tokens: int, share: float) -> Shared:
    """`tokens`: of the prompt, about. `share`: `DECODE_SHARE`."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        log = work / "log.jsonl"
        (work / "reply.txt").write_text(words(10_000, 1), "utf-8")
        stack.enter_context(patch.dict(os.environ, {"ORACLE_LOG": str(log)}))
        checkpoint = build_oracle(work / "oracle", "plain", layers=["K"])
        url = stack.enter_context(serving(checkpoint, work, {1: 1.0}, passes=PASSES, clock=VirtualClock()))
        answer = Answer(url)
        answer.start()
        while answer.pieces < ALONE:
            time.sleep(0.05)
        arrived = mark(log)
        ask(url, tokens, 2)
        over = mark(log)
        answer.over.set()
        answer.join(60)
        began = quiet(log)
        ask(url, tokens, 3)
        before = [one.t for one in passes(log, until=arrived) if one.decoded][-ALONE // 2 :]
        beside, alone = prompt_passes(list(passes(log, arrived, over))), prompt_passes(list(passes(log, began)))
    said = [one.t for one in beside if one.decoded]
    seconds = beside[-1].t - beside[0].t
    usual = (before[-1] - before[0]) / (len(before) - 1)
    return Shared(
        sum(one.computed for one in beside),
        len(said) / seconds * usual,
        seconds / (alone[-1].t - alone[0].t),
        max(b - a for a, b in pairwise(said)),
    )


class FirstToken(Collected):
    """When a request came, and when its first token did."""

    def __init__(self, runner: SlowRunner) -> None:
        super().__init__()
        self._runner, self.came, self.waited = runner, runner.now, math.inf

    def __call__(self, event: EngineEvent) -> None:
        super().__call__(event)
        if isinstance(event, Sampled):
            self.waited = min(self.waited, self._runner.now - self.came)


def beside_a_prompt(
    tokens: int, token: float, a_minute: float, seed: int, within: float = 0.0
) -> tuple[float, list[float]]:
    """Seconds to the prompt's first token, and to those of the questions. `within`: seconds in which one comes."""
    runner, chance = SlowRunner(token=token), random.Random(seed)
    scheduler, found = scheduler_of(runner, 0.5), list[FirstToken]()

    def add(count: int, answer: int) -> None:
        found.append(FirstToken(runner))
        name = len(found)
        scheduler.add(replace(submit(str(name), [name, *range(count - 1)], max_tokens=answer)[0], sink=found[-1]))

    if a_minute or within:
        add(QUESTION, 10)  # the server knows that questions come
    while scheduler.busy:
        scheduler.step()
    found.clear()
    add(tokens, 4096)
    due = runner.now + (chance.expovariate(a_minute / 60) if a_minute else within * chance.random() or math.inf)
    while not found[0].tokens:
        while due <= runner.now:
            add(QUESTION, 10)
            found[-1].came, due = due, due + (chance.expovariate(a_minute / 60) if a_minute else math.inf)
        scheduler.step()
    while any(not one.tokens for one in found):
        scheduler.step()
    return found[0].waited, [one.waited for one in found[1:]]


def without_a_prompt(own: float, a_minute: float, seed: int) -> list[float]:
    """Seconds to the first tokens of an hour's questions on a machine with no other work. `own`: what each takes."""
    chance, came, free, found = random.Random(seed), 0.0, 0.0, list[float]()
    while came < 3600:
        came += chance.expovariate(a_minute / 60)
        free = max(came, free) + own
        found.append(free - came)
    return found


def tell_questions(tokens: int, token: float, a_minute: float) -> None:
    alone = beside_a_prompt(tokens, token, 0, 1)[0]
    within, count = (0.0, SEEDS) if a_minute else (alone, ONE_EACH)
    runs = [beside_a_prompt(tokens, token, a_minute, seed, within) for seed in range(count)]
    waited = sorted(seconds for _, each in runs for seconds in each)
    longer = [prompt / alone for prompt, _ in runs]
    own = PASS * 2 + QUESTION * token
    print(f"a prompt of {tokens:,} tokens alone: {alone:.1f} s; a question alone: {own:.2f} s")
    print(f"{a_minute:g} questions a minute, {len(waited) / count:.1f} beside each prompt; {count} runs")
    print(f"the prompt takes {statistics.mean(longer):.2f} times as long, {max(longer):.2f} at most")
    shares = ", ".join(f"{name} {waited[int(len(waited) * share)]:.2f} s" for name, share in SHARES.items())
    print(f"first token of a question: {shares}, {waited[-1]:.2f} s at most")
    if 0 < own * a_minute < 60:
        least = sorted(seconds for seed in range(100) for seconds in without_a_prompt(own, a_minute, seed))
        print(f"with nothing else to compute, one after the other: p95 {least[int(len(least) * SHARES['p95'])]:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=30_000, help="of the prompt, about")
    parser.add_argument("--share", type=float, default=0.5, help="DECODE_SHARE")
    parser.add_argument("--questions", type=float, default=None, help="small ones that come beside it, a minute")
    parser.add_argument("--token", type=float, default=0.0017, help="with --questions: seconds of a prompt token")
    options = parser.parse_args()
    if options.questions is not None:
        tell_questions(options.tokens, options.token, options.questions)
        return 0
    found = shared(options.tokens, options.share)
    print(f"a prompt of {found.prompt:,} tokens takes {found.longer:.2f} times as long beside an answer as alone")
    print(f"the answer beside it: {found.speed:.2f} of its speed alone; longest pause {found.pause:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
