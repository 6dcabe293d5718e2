"""One attack after the other against a server of its own, and how long `/health` takes meanwhile.

`test_sieges` holds the limits.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.api.attacks import ATTACKS
from tests.fuzz.test_attacks import ATTACKS as DEAR
from tests.integration.processes import process
from tests.stress.watch import Health, HealthProbe, quantile, until_at_rest

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
USER = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
ATTACKERS = 2
"""Clients that send one body again and again: more than there are cores would say how busy the machine is."""

Siege = Callable[[int, threading.Event], None]
"""Attacks the port until the event is set."""


@dataclass(frozen=True)
class Figures:
    """Of one siege.

    `health`: what `/health` answered meanwhile.
    """

    name: str
    health: Health

    def line(self) -> str:
        """Milliseconds: median, 99th percentile, what of it is the server's own doing, and the worst; how late the
        machine itself was (99th percentile)."""
        took = sorted(self.health.took)
        late = quantile(self.health.late, 99)
        shown = [1000 * v for v in (statistics.median(took), self.health.p99, self.health.ours, took[-1], late)]
        numbers = "".join(f"{value:8.0f}" for value in shown)
        return f"{self.name:42}{len(took):6}{numbers}"


HEADLINE = f"{'attack':42}{'asked':>6}{'p50':>8}{'p99':>8}{'ours':>8}{'worst':>8}{'late':>8}  (ms)"


def sieges() -> Iterator[tuple[str, Siege | tuple[str, bytes]]]:
    """Every attack by its name: what is done, or a body that is sent to a path again and again."""
    yield "nobody attacks", lambda port, over: None
    for attack in (*ATTACKS, *DEAR):
        yield attack.name, (attack.path, attack.body)
    yield "16 bodies that are held back", partial(held_back, 16)
    yield "400 bodies that are held back", partial(held_back, 400)
    yield "20 bodies that trickle", partial(trickled, 20)
    yield "half-open connections, over the cap", half_open
    yield "answers that nobody reads", unread
    yield "bodies in chunks of one byte", tiny_chunks
    yield "clients that leave at once", leaving


def besiege(model: Path, folder: Path, seconds: float, say: Callable[[str], None]) -> list[Figures]:
    """Each attack for `seconds` on one server; `say` gets a line for each."""
    found: list[Figures] = []
    say(HEADLINE)
    with process(model, folder, MAX_KV_SIZE="8192") as (url, child):
        port = int(url.rsplit(":", 1)[1])
        for name, siege in sieges():
            found.append(_one(port, child.pid, name, siege, seconds))
            say(found[-1].line())
            until_at_rest(port)
        assert child.poll() is None
        say(f"the server holds {psutil.Process(child.pid).memory_info().rss >> 20} MiB afterwards")
    return found


def _one(port: int, process_id: int, name: str, siege: Siege | tuple[str, bytes], seconds: float) -> Figures:
    over = threading.Event()
    with ExitStack() as stack:
        if isinstance(siege, tuple):
            stack.enter_context(_senders(port, *siege))
            threads = []
        else:
            threads = [threading.Thread(target=siege, args=(port, over))]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        probe = HealthProbe(port, process_id, seconds)
        health = probe.result()
        over.set()
        for thread in threads:
            thread.join()
    return Figures(name, health)


@contextmanager
def _senders(port: int, path: str, body: bytes) -> Iterator[None]:
    """`ATTACKERS` processes that post `body` until the end: threads of this one would wait for each other."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        command = [sys.executable, "-c", SENDER, str(port), path, file.name]
        senders = [subprocess.Popen(command) for _ in range(ATTACKERS)]
        try:
            yield
        finally:
            for sender in senders:
                sender.kill()
                sender.wait()


SENDER = """
import http.client, sys
port, path, body = int(sys.argv[1]), sys.argv[2], open(sys.argv[3], "rb").read()
while True:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass
    connection.close()
"""


# --- what clients do that is no body ---


@contextmanager
def _connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]


def held_back(count: int, port: int, over: threading.Event) -> None:
    with _connections(port, count) as connections:
        for connection in connections:
            connection.sendall(f"{HEAD}Content-Length: 100000\r\n\r\n{{".encode())
        over.wait()


def trickled(count: int, port: int, over: threading.Event) -> None:
    with _connections(port, count) as connections:
        for connection in connections:
            connection.sendall(f"{HEAD}Content-Length: 1000000\r\n\r\n".encode())
        while not over.wait(0.01):
            for connection in connections:
                connection.sendall(b" ")


def half_open(port: int, over: threading.Event) -> None:
    """The oldest are closed by the server; they are opened again."""
    connections: list[socket.socket] = []
    try:
        while not over.is_set():
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            connections[-1].sendall(b"POST /v1/chat")
            if len(connections) > 1_200:
                connections.pop(0).close()
    finally:
        for connection in connections:
            connection.close()


def unread(port: int, over: threading.Event) -> None:
    """Endless requests whose answers pile up."""
    flood = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    with _connections(port, 4) as connections:
        for connection in connections:
            connection.setblocking(False)
        while not over.is_set():
            for connection in connections:
                try:
                    connection.send(flood)
                except BlockingIOError:
                    over.wait(0.01)


def tiny_chunks(port: int, over: threading.Event) -> None:
    while not over.is_set():
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            try:
                connection.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\nx\r\n" * 200_000)
                connection.recv(65536)
            except OSError:
                continue


def leaving(port: int, over: threading.Event) -> None:
    body = json.dumps(USER).encode()
    raw = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
    while not over.wait(0.002):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(raw)
