"""Where the end-to-end tests happen: a network of loopback only, the real server on the oracle, and agents in it.

Everything that is started here is ended here, by its own process group.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from start_llm.clients import CLIENTS
from start_llm.host.ports import ask_json, free_port
from start_llm.host.processes import wait_until
from tests.e2e.install import search_path

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = Path(__file__).with_name("terminal.py")
RECORDER = Path(__file__).with_name("recorder.py")
FIXED_PORTS = (18080, 18081)  # free in a network of one's own
START_SECONDS = 240
# Sets the loopback interface up and stays until its standard input closes.
HOLDER = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
print("ready", flush=True)
sys.stdin.read()
"""
WAIT = """
import sys, time, urllib.request
for _ in range(int(sys.argv[2]) * 10):
    try:
        if urllib.request.urlopen(sys.argv[1], timeout=5).status == 200:
            sys.exit(0)
    except OSError:
        time.sleep(0.1)
sys.exit("no answer from " + sys.argv[1])
"""
KEPT = ("LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def skip_unless_installed(name: str) -> None:
    path = os.pathsep.join(str(folder) for folder in search_path(name))
    if shutil.which(name, path=path) is None:
        pytest.skip(f"{CLIENTS[name].title} is not installed: python3.12 tests/e2e/install.py {name}")


@dataclass(frozen=True)
class Run:
    """One run of an agent: the requests that it sent, as the recorder and the server's log tell, in one order."""

    code: int | None
    output: str
    seconds: float
    sent: list[dict[str, Any]]
    served: list[dict[str, Any]]


@contextmanager
def loopback_network() -> Iterator[list[str]]:
    """Words to put before a command, so that it runs where nothing but loopback exists; none where that cannot be."""
    unshare, nsenter = shutil.which("unshare"), shutil.which("nsenter")
    if unshare is None or nsenter is None:
        yield []
        return
    command = [unshare, "--user", "--map-root-user", "--net", sys.executable, "-c", HOLDER]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        ready = holder.stdout.readline() == b"ready\n"
        target = ["--preserve-credentials", "--user", "--net", "--target", str(holder.pid)]
        yield [nsenter, *target] if ready else []
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


def begin(
    command: list[str], folder: Path, environment: Mapping[str, str], said: Path, given: Any = subprocess.DEVNULL
) -> subprocess.Popen[Any]:
    """Runs a command that leads a process group; what it says goes to the file `said`. `given`: its standard input."""
    with said.open("wb") as out:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdin=given, stdout=out, stderr=out, start_new_session=True
        )


def end(process: subprocess.Popen[Any], seconds: float = 15) -> None:
    """Ends a process that leads its group, and what it has left in it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class World:
    """The server, the recorder before it, and a folder for agents. Made by `make_world`.

    Attributes:
        network: words before a command, see `loopback_network`.
        client_port: where agents connect.
        proxy: port and key of the server's proxy, if agents are to go through it.
        more: variables of the agents beside the usual ones.
    """

    folder: Path
    network: list[str]
    server_port: int
    client_port: int
    proxy: tuple[int, str] | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def record(self) -> Path:
        return self.folder / "sent.jsonl"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def via(self) -> list[str]:
        return ["--via-proxy"] if self.proxy is not None else []

    def environment(self, name: str) -> dict[str, str]:
        """An agent's variables: nothing of the user's but the language and this machine's libraries."""
        home = self.folder / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        own = [str(path) for path in search_path(name)]
        path = os.pathsep.join([*own, str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        who = {f"GIT_{role}_{what}": "e2e@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        through = {}
        if self.proxy is not None:
            through = {"PROXY_PORT": str(self.proxy[0]), "LITELLM_MASTER_KEY": self.proxy[1]}
        return {
            **{key: os.environ[key] for key in KEPT if key in os.environ},
            **who,
            **through,
            "PATH": path,
            "HOME": str(home),
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            "PYTHONPATH": str(ROOT),
            "MLX_PORT": str(self.client_port),
            "START_LLM_CACHE_DIR": str(self.folder / name / "cache"),
            "LOG_ROOT": str(self.folder / name / "logs"),
            # Claude Code lets root go without asking only where this says that it is boxed in.
            "IS_SANDBOX": "1",
            **self.more,
        }

    def repository(self, name: str, part: str = "the-repository") -> Path:
        """A fresh scratch repository."""
        folder = self.folder / name / part
        (folder / "src").mkdir(parents=True)
        (folder / "src" / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        (folder / "src" / "util.py").write_text("def clamp(x, low, high):\n    return max(low, min(x, high))\n")
        (folder / "README.md").write_text("# Demo\n\nA scratch project.\n")
        for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
            subprocess.run(["git", *command], cwd=folder, env=self.environment(name), check=True)
        return folder

    def launch(
        self,
        name: str,
        folder: Path,
        arguments: list[str],
        text: str,
        seconds: float,
        typed: int | None = None,
        late: int = 0,
    ) -> Run:
        """Runs ``launch NAME -- ARGUMENTS`` in `folder`, for at most `seconds`.

        `text` is its standard input; with `typed`, it is typed in a terminal, which is left after that many requests.
        What runs beside it may still send some once it has ended: `late` is how many there are in all then.
        """
        before, served = len(self.sent()), len(self.served())
        command = [sys.executable, "-m", "start_llm", "launch", name, *self.via, "--", *arguments]
        environment = self.environment(name)
        if typed is not None:
            command = [sys.executable, str(TERMINAL), str(self.record), str(typed), *command]
            environment["TERM"] = "xterm-256color"
        output, began = self.folder / name / "output.txt", time.monotonic()
        (self.folder / name / "input.txt").write_text(text)
        with (self.folder / name / "input.txt").open("rb") as given:
            process = begin([*self.network, *command], folder, environment, output, given)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        took = time.monotonic() - began
        self.wait_for(before + late, served + late, seconds - took)
        sent = self.sent()[before:]
        # Requests of agents that run beside each other may end in one order and be written down in another.
        place = {entry["id"]: n for n, entry in enumerate(sent)}
        logged = sorted(self.served()[served:], key=lambda entry: place.get(entry["id"], len(place)))
        return Run(code, output.read_text(errors="replace"), took, sent, logged)

    @contextmanager
    def beside(self, name: str, folder: Path, arguments: list[str], url: str) -> Iterator[None]:
        """Runs ``launch NAME -- ARGUMENTS`` in the background; `url` answers once it is up."""
        command = [*self.network, sys.executable, "-m", "start_llm", "launch", name, *self.via, "--", *arguments]
        output = self.folder / name / "beside.txt"
        process = begin(command, folder, self.environment(name), output)
        try:
            waited = subprocess.run([*self.network, sys.executable, "-c", WAIT, url, str(START_SECONDS)], check=False)
            assert waited.returncode == 0, output.read_text(errors="replace")[-2000:]
            yield
        finally:
            end(process)

    def wait_for(self, sent: int, served: int, seconds: float) -> None:
        """Waits until so many requests are in both records, for at most `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and (len(self.sent()) < sent or len(self.served()) < served):
            time.sleep(0.1)

    def sent(self) -> list[dict[str, Any]]:
        """All POST requests that agents sent so far."""
        return _lines(self.record)

    def served(self) -> list[dict[str, Any]]:
        """The server's log of all requests so far, in order of their ends."""
        entries = [entry for path in self.logs.rglob("*.jsonl") for entry in _lines(path)]
        return sorted(entries, key=lambda entry: str(entry["time"]))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def server_settings(folder: Path, oracle: Path, port: int, *paths: Path) -> dict[str, str]:
    """`paths`: where the server's Python looks for modules, too."""
    return {
        "MODEL_PATH": str(oracle),
        "SERVED_MODEL_NAME": "oracle",
        "TRUST_REMOTE_CODE": "true",
        "MLX_PORT": str(port),
        "LOG_ROOT": str(folder / "logs"),
        "START_LLM_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
    }


@contextmanager
def make_world(
    folder: Path, oracle: Path, *paths: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[World]:
    """Server and recorder, up and answering.

    Args:
        paths: where the server's Python looks for modules, too.
        more: settings of the server beside the usual ones.
    """
    with loopback_network() as network:
        world = World(folder, network, *(FIXED_PORTS if network else (free_port(), free_port())))
        settings = server_settings(folder, oracle, world.server_port, *paths)
        settings |= {"MODEL_PROBE": "off", "PROXY": "off", **more}
        environment = {name: value for name, value in os.environ.items() if name in (*KEPT, "PATH", "HOME")} | settings
        ports = [str(world.client_port), str(world.server_port)]
        commands = {
            "server": [sys.executable, "-m", "start_llm", "serve"],
            "recorder": [sys.executable, str(RECORDER), *ports, str(world.record)],
        }
        running = []
        try:
            for name, command in commands.items():
                running.append(begin([*network, *command], folder, environment, folder / f"{name}.txt"))
            url = f"http://127.0.0.1:{world.client_port}/health"
            waited = subprocess.run([*network, sys.executable, "-c", WAIT, url, str(START_SECONDS)], check=False)
            assert waited.returncode == 0, (folder / "server.txt").read_text()[-2000:]
            yield world
        finally:
            for process in reversed(running):
                end(process)


KEY = "sk-end-to-end"


@dataclass(frozen=True)
class Target:
    """What a client connects to."""

    url: str
    key: str
    model: str


@contextmanager
def make_served(folder: Path, oracle: Path, *paths: Path) -> Iterator[tuple[dict[str, Target], World]]:
    """The real server, which starts the real proxy; both on free ports.

    Args:
        paths: where the server's Python looks for modules, too.
    """
    port, proxy_port = free_port(), free_port()
    given = server_settings(folder, oracle, port, *paths)
    given |= {"PROXY_PORT": str(proxy_port), "LITELLM_MASTER_KEY": KEY}
    process = begin([sys.executable, "-m", "start_llm", "serve"], folder, os.environ | given, folder / "server.txt")
    url, proxy_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy_port}"
    try:
        for ready in (f"{url}/health", f"{proxy_url}/health/readiness"):
            wait_until(lambda ready=ready: process.poll() is not None or ask_json(ready)[0] == 200, 120)  # type: ignore[misc]
            assert process.poll() is None and ask_json(ready)[0] == 200, (folder / "server.txt").read_text()[-3000:]
        yield (
            {
                "direct": Target(url, "none", "oracle"),
                "proxy": Target(proxy_url, KEY, "oracle"),
                "wildcard": Target(proxy_url, KEY, "claude-opus-4-6"),
            },
            World(folder, [], port, port, (proxy_port, KEY)),
        )
    finally:
        end(process)
