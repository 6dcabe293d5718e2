"""The system listens; the first request starts the server, waits for it, and is answered."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from start_llm.host.activation import LISTEN_FD
from tests.integration.lifecycle import Machine
from tests.integration.live import live
from tests.integration.processes import WAIT
from tests.integration.test_lifecycle import ask
from tests.waiting import until

# What systemd does: the socket is descriptor 3, and the variables name the process.
EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, "-m", "start_llm", "supervise"])
"""


class System:
    """Holds the socket, and starts the service when somebody connects."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._socket = socket.create_server(("127.0.0.1", machine.port))
        self._socket.setblocking(False)
        self._over = threading.Event()
        self.starts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            if select.select([self._socket], [], [], 0.1)[0]:
                self.starts += 1
                number = self._socket.fileno()
                words = [sys.executable, "-c", EXEC, str(number)]
                subprocess.run(words, env=self._machine.environment, pass_fds=[number], check=False)

    def end(self) -> None:
        self._over.set()
        self._machine.run("stop")
        self._thread.join(WAIT)
        self._socket.close()


@pytest.fixture
def machine(oracle_path: Callable[..., Path], tmp_path: Path) -> Iterator[Machine]:
    made = Machine(oracle_path("plain"), tmp_path, IDLE_SHUTDOWN_MINUTES="0.005")
    unit = tmp_path / ".config/systemd/user/start-llm.socket"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"[Socket]\nListenStream=127.0.0.1:{made.port}\n")
    yield made
    made.end()


def test_a_request_waits_in_the_socket_until_it_can_be_answered(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held, ThreadPoolExecutor(1) as pool:
        port = held.getsockname()[1]
        answer = pool.submit(ask, port)  # no server is there yet
        monkeypatch.setenv(LISTEN_FD, str(os.dup(held.fileno())))
        with live(oracle_path("plain"), tmp_path) as server:
            assert answer.result(WAIT) == 200 and server.app.port == port
        socket.create_connection(("127.0.0.1", port)).close()  # the server has gone, and the port is still held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="systemd's way")
def test_the_first_request_starts_the_server_and_is_answered(machine: Machine) -> None:
    system = System(machine)
    try:
        asked = machine.run("status")
        assert asked.returncode == 3 and asked.stdout.startswith("on demand "), asked.stdout + asked.stderr
        assert system.starts == 0  # asking how it does starts nothing
        assert ask(machine.port) == 200 and system.starts == 1
        state = machine.reach(lambda state: state["phase"] == "ready")
        assert state["activated"]
        os.kill(state["engine"], signal.SIGKILL)  # requests of that time wait in the socket
        assert ask(machine.port) == 200
        assert machine.reach(lambda state: state["phase"] == "ready" and state["restarts"] == 1)["pid"] == state["pid"]
        assert machine.run("stop").returncode == 0
        until(lambda: not machine.ours())
        agent = machine.launch("pi")
        until(lambda: "bin/pi" in machine.said("pi"))
        assert "the system starts the server" in machine.said("pi") and system.starts == 2
        assert machine.finish("pi", agent) == 0
    finally:
        system.end()
    until(machine.is_empty)
