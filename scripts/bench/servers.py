"""The servers under test: one that runs already, or ours and mlx_lm.server started here on the oracle."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from start_llm.host.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


@dataclass
class Server:
    """Where to ask.

    Attributes:
        log: the oracle's log, or ``None`` if the work cannot be counted.
        replies: the file that gives the oracle its next answer, for recorded traces.
        restart: kills it and starts it again, or ``None``.
    """

    name: str
    url: str
    model: str
    key: str = "none"
    log: Path | None = None
    replies: Path | None = None
    restart: Callable[[], None] | None = None


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        status = httpx.get(url + "/health", timeout=5.0).status_code
        if status == 404:  # no such route: then the list of models must do
            status = httpx.get(url + "/v1/models", timeout=5.0).status_code
        return status == 200
    return False


def wait_until_up(url: str, process: subprocess.Popen[bytes] | None, log: Path | None = None) -> None:
    """Returns when ``/health`` (or else ``/v1/models``) answers 200.

    Raises RuntimeError if the process ends or time is up.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            tail = log.read_text(errors="replace")[-2000:] if log else ""
            raise RuntimeError(f"the server ended with status {process.returncode}\n{tail}")
        if _answers(url):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not come up within {START_SECONDS:.0f} s")


def _command(kind: str, checkpoint: Path, port: int, work: Path, reanchor: str) -> tuple[list[str], dict[str, str]]:
    if kind == "mlx_lm":
        command = [sys.executable, "-m", "mlx_lm", "server", "--trust-remote-code", "--model", str(checkpoint)]
        return [*command, "--port", str(port)], {}
    settings = {
        "MODEL_PATH": str(checkpoint),
        "TRUST_REMOTE_CODE": "true",
        "MLX_PORT": str(port),
        "PROXY": "off",
        "REANCHOR": reanchor,
        "START_LLM_CACHE_DIR": str(work / "cache"),
        "LOG_ROOT": str(work / "logs"),
    }
    return [sys.executable, "-m", "start_llm", "serve"], settings


class Started:
    """A server process of ours, in its own folder and process group."""

    def __init__(
        self, kind: str, checkpoint: Path, work: Path, reanchor: str = "off", extra: dict[str, str] | None = None
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.output = work / "output.log"
        self.log, self.replies = work / "oracle.jsonl", work / "reply.txt"
        self.command, settings = _command(kind, checkpoint, self.port, work, reanchor)
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        oracle = {"ORACLE_LOG": str(self.log), "ORACLE_REPLIES": str(self.replies), "PYTHONPATH": python_path}
        self.environment = {**os.environ, **settings, **oracle, **(extra or {})}
        self.work = work
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.work, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        wait_until_up(self.url, self.process, self.output)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process and its group; kills it if it does not end within 10 s."""
        if self.process is None:
            return
        for sent in (how, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                break
        self.process = None

    def restart(self) -> None:
        self.stop(signal.SIGKILL)
        self.start()


@contextlib.contextmanager
def served(
    kind: str, checkpoint: Path, work: Path, reanchor: str = "off", extra: dict[str, str] | None = None
) -> Iterator[Server]:
    """Runs ``start_llm`` or ``mlx_lm`` on a checkpoint, `extra` in its environment; stops it at the end."""
    started = Started(kind, checkpoint, work, reanchor, extra)
    try:
        started.start()
        model = "default_model"
        if kind == "start_llm":
            model = httpx.get(started.url + "/v1/models", timeout=30.0).json()["data"][0]["id"]
        yield Server(kind, started.url, model, "none", started.log, started.replies, started.restart)
    finally:
        started.stop()


def restarter(command: str, url: str) -> Callable[[], None]:
    """A restart by a user's own command, which must return; waits until the server answers again."""

    def restart() -> None:
        subprocess.run(shlex.split(command), check=True)
        wait_until_up(url.rstrip("/").removesuffix("/v1"), None)

    return restart
