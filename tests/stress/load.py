"""Clients as they are: 200 at once, some good, some slow, some gone in the middle, some saying nonsense.

All on one event loop, over plain sockets, so that they can send what no library would. Each client does one random
thing after the other and judges the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.api.attacks import ATTACKS

ANSWER_SECONDS = 120.0
"""No answer for so long is a hang."""
LATE_ERRORS = frozenset({"rate_limit_error", "overloaded_error"})
FINE = frozenset({200, 204, 400, 401, 404, 405, 408, 413, 415, 429, 431, 501, 503, 505, 507})
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
READ_ONLY = ("/health", "/metrics", "/v1/models", "/v1/cache/requests", "/v1/models/gpt-x", "/nothing")
SYSTEM = "You are careful. " * 40


@dataclass
class Tally:
    """What the clients have seen.

    Attributes:
        statuses: answers by what was done and their status.
        wrong: what must not be, in words; at most a hundred.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def answered(self, what: str, status: int) -> None:
        self.statuses[f"{what} {status}"] += 1
        if status not in FINE or (status in {501, 507} and what != "bad body"):
            self.blame(what, f"status {status}")

    def blame(self, what: str, why: str) -> None:
        if len(self.wrong) < 100:
            self.wrong.append(f"{what}: {why}")


class Client:
    """One of many. `run` ends at `until`, on the monotonic clock, or soon after."""

    def __init__(self, port: int, seed: int, tally: Tally, until: float) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._tally = tally
        self._until = until
        self._doings: list[tuple[int, str, Callable[[str], Awaitable[None]]]] = [
            (10, "answer", self._whole_answer),
            (6, "stream", self._whole_stream),
            (6, "leaves a stream", self._leave_stream),
            (4, "leaves", self._leave_at_once),
            (4, "slow body", self._slow_body),
            (3, "held body", self._hold_body),
            (2, "slow reader", self._read_slowly),
            (5, "bad body", self._bad_body),
            (3, "bad head", self._bad_head),
            (2, "large body", self._large_body),
            (2, "stored", self._stored),
            (2, "idle", self._idle),
            (5, "get", self._get),
        ]

    async def run(self) -> None:
        weights = [weight for weight, _, _ in self._doings]
        while time.monotonic() < self._until:
            _, what, doing = self._random.choices(self._doings, weights)[0]
            try:
                await asyncio.wait_for(doing(what), ANSWER_SECONDS)
            except TimeoutError:
                self._tally.blame(what, f"no answer in {ANSWER_SECONDS:.0f} s")
            except (OSError, asyncio.IncompleteReadError) as error:
                self._tally.blame(what, f"closed without an answer: {error!r}")
            await asyncio.sleep(self._random.random() * 0.3)

    # --- what a client may do ---

    async def _whole_answer(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            for _ in range(self._random.randint(1, 3)):
                writer.write(request(*self._question(stream=False)))
                if await self._answer(what, reader) != 200:
                    break

    async def _whole_stream(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            writer.write(request(*self._question(stream=True)))
            if await self._head(what, reader) == 200:
                end = (await reader.read(-1)).rstrip()
                if (told := error_inside(end)) is not None:
                    self._tally.statuses[f"{what} 200, then {told}"] += 1
                    if told not in LATE_ERRORS:
                        self._tally.blame(what, f"an error inside: {end[-300:]!r}")
                elif not end.endswith((b"[DONE]", b'"message_stop"}')) and b"response.completed" not in end:
                    self._tally.blame(what, f"broken off: {end[-80:]!r}")

    async def _leave_stream(self, what: str) -> None:
        reader, writer = await self._connect()
        writer.write(request(*self._question(stream=True)))
        await self._until_left(reader.read(self._random.randint(1, 2000)))
        self._abandon(what, writer)

    async def _leave_at_once(self, what: str) -> None:
        _, writer = await self._connect()
        raw = request(*self._question(stream=self._random.random() < 0.5))
        writer.write(raw[: self._random.randint(0, len(raw))])
        await asyncio.sleep(self._random.random() * 0.5)
        self._abandon(what, writer)

    async def _slow_body(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            raw = request(*self._question(stream=False))
            begin = raw.index(b"\r\n\r\n") + 4
            step = max(1, (len(raw) - begin) // self._random.randint(3, 20))
            writer.write(raw[:begin])
            for place in range(begin, len(raw), step):
                await asyncio.sleep(self._random.random() * 0.2)
                writer.write(raw[place : place + step])
            await self._answer(what, reader)

    async def _hold_body(self, what: str) -> None:
        _, writer = await self._connect()
        raw = request(*self._question(stream=False))
        writer.write(raw[:-1])
        await asyncio.sleep(self._random.random() * 10)
        self._abandon(what, writer)

    async def _read_slowly(self, what: str) -> None:
        reader, writer = await self._connect(limit=64)
        writer.write(request(*self._question(stream=True)))
        for _ in range(self._random.randint(1, 30)):
            await self._until_left(reader.read(self._random.randint(1, 50)))
            await asyncio.sleep(0.1)
        self._abandon(what, writer)

    async def _bad_body(self, what: str) -> None:
        path, raw = self._random.choice(bad_bodies())
        await self._ask(what, request(path, raw))

    async def _bad_head(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            writer.write(self._random.choice(BAD_HEADS))
            await self._answer(what, reader)
            if await reader.read(1) != b"":
                self._tally.blame(what, "the connection stayed open")

    async def _large_body(self, what: str) -> None:
        """It goes to disk, and does not fit the context."""
        text = "word " * self._random.randint(250_000, 500_000)
        await self._ask(what, request(CHAT, json.dumps(say(text)).encode()))

    async def _stored(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            body = {"model": "default", "input": self._words(), "max_output_tokens": 8, "store": True}
            writer.write(request(RESPONSES, json.dumps(body).encode()))
            status, answer = await self._body(reader)
            self._tally.answered(what, status)
            if status == 200:
                writer.write(get(f"{RESPONSES}/{json.loads(answer)['id']}/input_items"))
                if (status := await self._answer(what, reader)) not in {200, 429}:
                    self._tally.blame(what, f"what was stored is not there: {status}")

    async def _idle(self, what: str) -> None:
        _, writer = await self._connect()
        await asyncio.sleep(self._random.random() * 5)
        self._abandon(what, writer)

    async def _get(self, what: str) -> None:
        async with self._connected() as (reader, writer):
            for _ in range(self._random.randint(1, 5)):
                writer.write(get(self._random.choice(READ_ONLY)))
                await self._answer(what, reader)

    # --- how ---

    def _question(self, *, stream: bool) -> tuple[str, bytes]:
        number = self._random.randint(1, 40)
        path = self._random.choice((CHAT, CHAT, MESSAGES, RESPONSES))
        cue = f"{self._words()} [[long {number}]]"
        if path == RESPONSES:
            body: dict[str, Any] = {"model": "default", "input": cue, "max_output_tokens": 50, "store": False}
        else:
            body = say(cue) | {"max_tokens": 50}
        if path == CHAT:
            body["messages"] = [{"role": "system", "content": SYSTEM}, *body["messages"]]
        return path, json.dumps(body | {"stream": stream}).encode()

    def _words(self) -> str:
        return " ".join(
            self._random.choice(("red", "green", "blue", "left")) for _ in range(self._random.randint(1, 300))
        )

    async def _connect(self, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, limit=limit)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await self._connect()
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _ask(self, what: str, raw: bytes) -> None:
        async with self._connected() as (reader, writer):
            writer.write(raw)
            await self._answer(what, reader)

    async def _answer(self, what: str, reader: asyncio.StreamReader) -> int:
        status, _ = await self._body(reader)
        self._tally.answered(what, status)
        return status

    async def _head(self, what: str, reader: asyncio.StreamReader) -> int:
        status, length = await read_head(reader)
        self._tally.answered(what, status)
        if status != 200:
            await reader.readexactly(length)
        return status

    async def _body(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        status, length = await read_head(reader)
        return status, await reader.readexactly(length)

    async def _until_left(self, reading: Awaitable[bytes]) -> None:
        """A client that wants to leave does not wait long for the reason."""
        try:
            await asyncio.wait_for(reading, self._random.random() * 5)
        except (TimeoutError, OSError):
            return

    def _abandon(self, what: str, writer: asyncio.StreamWriter) -> None:
        self._tally.statuses[what] += 1
        if self._random.random() < 0.5:
            writer.transport.abort()  # a reset
        else:
            writer.close()


async def storm(port: int, clients: int, seconds: float) -> Tally:
    """All clients for `seconds`, and until each has ended what it was at."""
    bad_bodies()
    tally, until = Tally(), time.monotonic() + seconds
    await asyncio.gather(*(Client(port, seed, tally, until).run() for seed in range(clients)))
    return tally


def say(text: str) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}]}


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def error_inside(stream: bytes) -> str | None:
    """The type of the error that a stream ended with."""
    found = re.search(rb'"error":\{[^{}]*"type":"(\w+)"', stream[-2000:])
    return None if found is None else found[1].decode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Status and length of the body. Raises IncompleteReadError where the connection ended."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    _, _, length = head.partition("content-length: ")
    return int(head.split()[1]), int(length.split()[0]) if length else 0


@cache
def bad_bodies() -> list[tuple[str, bytes]]:
    """Attacks that have at most two megabytes, and plain nonsense."""
    nonsense = (b"{", b"[]", b"null", b"\xff", b"", b'{"messages":[1]}')
    attacks = ((attack.path, attack.body) for attack in ATTACKS)
    return [*(each for each in attacks if len(each[1]) < 2_000_000), *((CHAT, body) for body in nonsense)]


HOST = b"Host: localhost\r\n"
BAD_HEADS = [
    b"GARBAGE\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/3.0\r\n" + HOST + b"\r\n",
    b"GET /health HTTP/1.1\n" + HOST + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 70_000,
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n",
]
