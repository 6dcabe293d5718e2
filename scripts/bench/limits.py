"""Promises that need a server set up for them: short memory, slow prefills, a kill. Ours only, on the oracle.

Each gives a `Limit`: what was measured, and the most that it may be.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.agent import Agent, Json, Step
from scripts.bench.counting import request_units
from scripts.bench.runner import Run
from scripts.bench.servers import Server, served
from scripts.bench.texts import Writer
from tests.oracle.log import mark, passes, work_done

SESSION_TOKENS, LONG_TOKENS, KILLED_TOKENS = 8_000, 10_000, 20_000
ONE_SHOTS, SUBAGENTS = 200, 12
BYTES_PER_TOKEN = 16  # two attention layers, a float32 key and a float32 value each
CHUNK = 512
Count = Callable[[str], int]


@dataclass(frozen=True)
class Limit:
    """`value` must be at most `limit`; `wrong` lists wrong answers."""

    name: str
    value: float
    limit: float
    detail: str
    wrong: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return self.value <= self.limit and not self.wrong


def _long_agent(run: Run, tokens: int) -> Agent:
    """A session whose prompt has at least `tokens` tokens."""
    writer = Writer(run.seed)
    agent = Agent(run, writer.system(20), writer.tools())
    while run.books.price(request_units(agent.messages, agent.tools)) < tokens:
        agent.turn(writer.task(40), writer.steps(calls=1, result_lines=60))
    return agent


def _next_turn(run: Run, agent: Agent) -> tuple[float, str]:
    """Computed / new tokens of one more exchange of `agent`."""
    writer, before = Writer(run.seed + "-next"), len(run.result.rows)
    assert run.log is not None
    start = mark(run.log)
    agent.turn(writer.task(), writer.steps())
    new, computed = sum(row.new for row in run.result.rows[before:]), work_done(run.log, start)
    return computed / new, f"{computed} computed, {new} new"


def pressure(checkpoint: Path, work: Path, count: Count, nonce: str) -> Limit:
    """A session, then many side requests and sub-agents under a budget of three times its size."""
    memory = 3 * SESSION_TOKENS * BYTES_PER_TOKEN
    extra = {"CACHE_MEMORY_BYTES": str(memory), "KV_DISK_DIR": "off"}
    with served("start_llm", checkpoint, work, extra=extra) as server:
        run = Run("pressure", server, count, nonce)
        agent, writer = _long_agent(run, SESSION_TOKENS), Writer(f"side-{nonce}")
        for number in range(ONE_SHOTS):
            side = Agent(run, f"Write a title of at most six words, number {number}.", [])
            side.turn(writer.prose(8), [Step(f"Title {number}")])
        for _ in range(SUBAGENTS):
            Agent(run, agent.system, agent.tools).turn(writer.task(), writer.steps(calls=1))
        ratio, detail = _next_turn(run, agent)
        return Limit(
            "a session's next turn after 200 side requests and 12 sub-agents, computed / new", ratio, 1.2, detail
        )


def killed(checkpoint: Path, work: Path, count: Count, nonce: str) -> Limit:
    """``kill -9`` between two turns of a long conversation."""
    with served("start_llm", checkpoint, work) as server:
        run = Run("killed", server, count, nonce)
        agent = _long_agent(run, KILLED_TOKENS)
        run.restart()
        ratio, detail = _next_turn(run, agent)
        return Limit("the next turn of 20,000 tokens after kill -9, computed / new", ratio, 1.1, detail)


def _prompt(seed: str, count: Count, tokens: int) -> list[Json]:
    writer, lines = Writer(seed), 100
    text = writer.prose(lines)
    while count(text) < tokens:
        text += "\n" + writer.prose(lines)
    return [{"role": "user", "content": text}]


def _body(server: Server, messages: list[Json]) -> Json:
    return {"model": server.model, "messages": messages, "stream": True, "max_tokens": 64, "temperature": 0}


def _ask_and_leave(server: Server, messages: list[Json], enough: threading.Event) -> None:
    """Sends a request and closes the connection as soon as `enough` is set."""
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=_body(server, messages), timeout=60.0
        ) as response,
    ):
        for _ in response.iter_raw():
            if enough.is_set():
                return


def cancelled(checkpoint: Path, work: Path, count: Count, nonce: str) -> Limit:
    """A client leaves in the middle of a long prefill and asks the same again."""
    extra = {"ORACLE_SLEEP_PER_TOKEN": "0.0004", "SSE_PING_SECONDS": "0.2", "PREFILL_STEP_SIZE": str(CHUNK)}
    with served("start_llm", checkpoint, work, extra=extra) as server:
        assert server.log is not None
        messages, enough, start = _prompt(f"cancelled-{nonce}", count, LONG_TOKENS), threading.Event(), mark(server.log)
        client = threading.Thread(target=_ask_and_leave, args=(server, messages, enough))
        client.start()
        while work_done(server.log, start) < LONG_TOKENS // 3 and client.is_alive():
            time.sleep(0.05)
        enough.set()
        client.join()
        before = work_done(server.log, start)
        httpx.post(f"{server.url}/v1/chat/completions", json=_body(server, messages), timeout=60.0)
        total, held = work_done(server.log, start), _deepest(server.log, start)
        detail = f"{before} computed before the client left, {total} in all, prompt of {held}"
        name = f"a cancelled prefill asked again, tokens computed twice (a chunk is {CHUNK})"
        return Limit(name, total - held, CHUNK, detail)


def _deepest(log: Path, start: int) -> int:
    """Tokens of the longest prompt that went through the model."""
    ends = [
        offset + tokens
        for entry in passes(log, start)
        for tokens, offset, decode in zip(entry.tokens, entry.offsets, entry.decode, strict=True)
        if not decode
    ]
    return max(ends, default=0)


def twice_at_once(checkpoint: Path, work: Path, count: Count, nonce: str) -> Limit:
    """Two identical requests at the same time."""
    with served("start_llm", checkpoint, work, extra={"ORACLE_SLEEP_PER_TOKEN": "0.0001"}) as server:
        assert server.log is not None
        body, start = _body(server, _prompt(f"twice-{nonce}", count, LONG_TOKENS)), mark(server.log)
        with ThreadPoolExecutor(2) as pool:
            url = f"{server.url}/v1/chat/completions"
            answers = list(pool.map(lambda _: httpx.post(url, json=body, timeout=60.0).status_code, range(2)))
        total, held = work_done(server.log, start), _deepest(server.log, start)
        wrong = tuple(f"status {status}" for status in answers if status != 200)
        name = "two identical requests at once, tokens computed twice"
        return Limit(name, total - held, 16, f"{total} computed, prompt of {held}", wrong)


LIMITS = (pressure, killed, cancelled, twice_at_once)


def measure(checkpoint: Path, work: Path, count: Count, nonce: str) -> list[Limit]:
    """All of them, each on a server of its own."""
    return [limit(checkpoint, work / limit.__name__, count, nonce) for limit in LIMITS]
