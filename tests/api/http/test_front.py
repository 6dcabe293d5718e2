"""Clients that are slow, silent or many: what they hold is bounded, and it is never a worker."""

from __future__ import annotations

import errno
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.api import handler
from start_llm.api.http import connection as connections
from start_llm.api.http import front
from start_llm.api.http import listener as door
from start_llm.api.http.connection import ReceivedBody
from start_llm.api.server import ApiServer
from start_llm.core.errors import Unavailable
from start_llm.core.events import TextDelta
from start_llm.core.limits import Allowance
from tests.api.conftest import CHAT, PATH, Connect, Raw, Serve
from tests.api.fakes import FIRST, FakeService, answer, hold
from tests.kinds import rounds
from tests.waiting import until

RAW = json.dumps(CHAT).encode()
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"
ROOT = Path(__file__).parents[3]
SOON = 60.0
"""Seconds; what waits for a held worker takes longer, see `patient`."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a client waits for longer than the tests do."""
    for module, name in ((connections, "SILENCE_SECONDS"), (handler, "SILENCE_SECONDS"), (front, "STALL_SECONDS")):
        monkeypatch.setattr(module, name, 10 * SOON)


def held_back(raw: Raw, size: int = 100_000) -> Raw:
    return raw.send(f"{HEAD}Content-Length: {size}\r\n\r\n{{")


def figure(server: ApiServer, connect: Connect, name: str) -> float:
    text = connect(server).get("/metrics").response()[2].decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"start_llm_{name} "))


@pytest.mark.parametrize("clients", [16, 200])
@pytest.mark.parametrize("threads", [1, 2])
def test_bodies_that_are_held_back_hold_no_worker(serve: Serve, connect: Connect, clients: int, threads: int) -> None:
    server = serve(http_threads=threads)
    slow = [held_back(connect(server)) for _ in range(clients)]
    for raw in slow[::2]:
        raw.send(" ")
    began = time.monotonic()
    assert connect(server).post(PATH, CHAT).response()[0] == 200
    assert connect(server).get("/health").response()[0] == 200
    assert time.monotonic() - began < SOON


def test_a_trickled_body_is_served_in_the_end(serve: Serve, service: FakeService, connect: Connect) -> None:
    server = serve(http_threads=2)
    trickling = [connect(server).send(f"{HEAD}Content-Length: {len(RAW)}\r\n\r\n") for _ in range(20)]
    for place in range(0, len(RAW), 7):
        for raw in trickling:
            raw.send(RAW[place : place + 7])
    assert [raw.response()[0] for raw in trickling] == [200] * 20


def test_a_body_that_never_ends_is_given_up(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(front, "SWEEP_SECONDS", 0.02)
    raw = held_back(connect(serve()))
    began = time.monotonic()
    while not readable(raw):  # a byte now and then is no reason to wait for ever
        assert time.monotonic() - began < SOON
        raw.send(" ")
        time.sleep(0.05)
    status, headers, answered = raw.response()
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(answered)["error"]["code"] == "request_timeout"


def readable(raw: Raw) -> bool:
    """An answer has come, or the end."""
    return bool(select.select([raw.socket], [], [], 0)[0])


# --- where bodies wait ---


def test_a_large_body_waits_on_disk(
    serve: Serve, service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[Any] = []
    make = connections.tempfile.TemporaryFile

    def made(**options: Any) -> Any:
        files.append(make(**options))
        return files[-1]

    monkeypatch.setattr(connections.tempfile, "TemporaryFile", made)
    server = serve()
    for size, on_disk in ((200_000, 0), (3_000_000, 1)):
        text = "x" * size
        whole = CHAT | {"messages": [{"role": "user", "content": text}]}
        assert connect(server).post(PATH, whole).response()[0] == 200
        assert service.requests[-1].messages[0].content == text
        assert len(files) == on_disk
    assert files[0].closed


def test_room_for_bodies_is_given_back() -> None:
    bodies = Allowance(3 << 20)
    mib = bytes(1 << 20)
    first, second = ReceivedBody(bodies), ReceivedBody(bodies)
    first.write(mib)
    second.write(mib)
    second.write(b"ab")
    with pytest.raises(Unavailable, match="large requests"):
        first.write(mib)
    assert second.read() == mib + b"ab"
    first.write(mib)
    for _ in range(2):
        first.close()
    assert bodies.take(3 << 20) and not bodies.take(1)


def test_no_room_for_a_body_is_told(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(connections.tempfile, "TemporaryFile", full)
    server = serve()
    status, headers, _ = connect(server).post(PATH, b"x" * 2_000_000).response()
    assert (status, headers["retry-after"]) == (503, "2")
    assert connect(server).post(PATH, CHAT).response()[0] == 200


def test_a_body_without_a_key_is_not_waited_for(serve: Serve, connect: Connect) -> None:
    server = serve(api_key="k")
    for raw in (held_back(connect(server)), connect(server).send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")):
        status, headers, _ = raw.response()
        assert (status, headers["connection"]) == (401, "close")


# --- connections ---


def test_at_the_cap_the_oldest_goes(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_WAITING", 20)
    server = serve()
    idle = [connect(server) for _ in range(5)]
    heads = [connect(server).send("GET /hea") for _ in range(5)]
    held = [held_back(connect(server)) for _ in range(10)]
    more = 0
    while not readable(heads[0]):  # it comes after those that said nothing
        more += 1
        assert more < 30
        assert connect(server).post(PATH, CHAT).response()[0] == 200
    assert all(raw.is_closed() for raw in [*idle, heads[0]])
    assert heads[-1].send("lth HTTP/1.1\r\nHost: localhost\r\n\r\n").response()[0] == 200
    assert held[0].send(" " * 99_999).response()[0] == 400  # not dropped: read to its end
    assert figure(server, connect, "http_dropped") >= 6
    assert figure(server, connect, "http_waiting") <= 20


SERVED = """
import logging, os, resource, sys, time
from pathlib import Path
from start_llm.core.settings import Settings
from tests.api.fakes import FakeService, make_server
logging.basicConfig()
folder = Path(sys.argv[1])
service = FakeService()
server = make_server(Settings(_env_file=None, mlx_port=0, log_root=folder, start_llm_cache_dir=folder), service)
server.start()
"""
EXHAUSTED = (
    SERVED
    + """
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    os.close(held.pop())
    print(server.port, flush=True)
sys.stdin.readline()
spent = time.process_time()
sys.stdin.readline()
print(time.process_time() - spent, flush=True)
for descriptor in held:
    os.close(descriptor)
sys.stdin.readline()
server.stop(0)
"""
)
PINNED = (
    SERVED
    + """
def pin(request):
    print("pinned", flush=True)
    while True:
        pass
service.script = pin
print(server.port, flush=True)
sys.stdin.readline()
assert not server.stop(0)
"""
)


@contextmanager
def child(code: str, folder: Path) -> Iterator[tuple[Any, int]]:
    """A process that serves, and its port."""
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@pytest.mark.live
def test_no_free_descriptor_in_a_process(tmp_path: Path) -> None:
    """One is free: the second client waits, without work, until there are more."""
    with child(EXHAUSTED, tmp_path) as (process, port):
        clients = [Raw(port) for _ in range(5)]
        for _ in range(2):
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(1.2)
        assert float(process.stdout.readline()) < 0.5
        late = Raw(port)
        assert late.get("/health").response()[0] == 200
        for raw in [*clients, late]:
            raw.close()
        _, errors = process.communicate("\n", timeout=30)
        assert errors.count("no connection can be accepted") == 1, errors
        assert process.returncode == 0


# --- answers that nobody reads ---


def test_answers_that_are_not_read_hold_no_worker(serve: Serve, service: FakeService, connect: Connect) -> None:
    long = "y" * 20_000_000
    service.script = lambda request: answer(TextDelta(long if request.max_tokens else "short"))
    server = serve(http_threads=2)
    lazy = [connect(server).post(PATH, CHAT | {"max_tokens": 5}) for _ in range(4)]
    until(lambda: len(service.requests) == 4)
    began = time.monotonic()
    assert connect(server).post(PATH, CHAT).response()[0] == 200
    assert time.monotonic() - began < SOON
    for raw in lazy:
        status, headers, whole = raw.response()
        assert (status, headers["connection"]) == (200, "keep-alive")
        assert json.loads(whole)["choices"][0]["message"]["content"] == long
        assert raw.get("/health").response()[0] == 200


def test_an_answer_that_is_never_read_is_given_up(
    serve: Serve, service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(front, "SWEEP_SECONDS", 0.02)
    dropped, drop = threading.Event(), connections.Connections.drop
    monkeypatch.setattr(connections.Connections, "drop", lambda *given: (drop(*given), dropped.set()))
    service.script = lambda request: answer(TextDelta("y" * 20_000_000))
    server = serve()
    raw = connect(server).post(PATH, CHAT)
    assert service.streams.get(timeout=60).closed.wait(60)
    assert dropped.wait(60), "it is handed to the front, which gives it up"
    until(lambda: server._front.figures()["http_waiting"] == 0)
    with pytest.raises(IncompleteRead):
        raw.response()


def test_requests_behind_unread_answers_stay_with_their_client(serve: Serve, connect: Connect) -> None:
    server = serve()
    flood = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    for _ in range(rounds(3, 1)):
        raw = connect(server)
        raw.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            for _ in range(2000):  # 90 MB: more than any buffer between here and there
                raw.send(flood)
        began = time.monotonic()
        assert connect(server).get("/health").response()[0] == 200
        assert time.monotonic() - began < SOON


# --- the end ---


def test_stalled_clients_do_not_hold_up_the_end(serve: Serve, service: FakeService, connect: Connect) -> None:
    service.script = lambda request: [FIRST, *[TextDelta("y" * 1_000_000)] * 50, hold]
    server = serve(http_threads=4)
    held = [held_back(connect(server)) for _ in range(50)]
    streams = [connect(server).post(PATH, CHAT | {"stream": True}) for _ in range(8)]
    until(lambda: len(service.requests) == 4)
    began = time.monotonic()
    server.stop(0)
    assert time.monotonic() - began < SOON
    assert server._pools["work"].wait_idle(60), "the workers are done"
    for raw in held:
        status, _, told = raw.response()
        assert status == 503 and b"shutting down" in told
    assert len(streams) == 8


@pytest.mark.live
def test_a_worker_that_never_returns_does_not_hold_up_the_process(tmp_path: Path) -> None:
    with child(PINNED, tmp_path) as (process, port):
        raw = Raw(port).post(PATH, CHAT)
        assert process.stdout.readline() == "pinned\n"
        _, errors = process.communicate("\n", timeout=60)
        assert (process.returncode, errors) == (0, "")
        raw.close()
