"""The LiteLLM proxy as a child process: started, awaited, stopped, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from start_llm.core.extras import is_installed, missing
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.files.logs import begin_log, last_lines, trim_log
from start_llm.host.home import python_path
from start_llm.host.ports import address, ask_json, free_port, is_free, who_listens
from start_llm.host.processes import wait_until
from start_llm.proxy import config as proxy_config
from start_llm.proxy.child import MODULE
from start_llm.proxy.elsewhere import entries

_STOP_SECONDS = 5.0
_LOG_BYTES = 16 << 20


class ProxyError(RuntimeError):
    """The proxy cannot be started. The message says what stands in the way and what to do."""


class LiteLLMProxy:
    """One LiteLLM proxy in front of `server_url`. Methods may be called from any thread, one at a time."""

    def __init__(
        self,
        settings: Settings,
        *,
        server_url: str,
        model_id: str,
        card: ModelCard,
        log_path: Path,
        env_file: Path = Path(".env"),
    ) -> None:
        """Starts nothing.

        Args:
            model_id: the name under which the server serves its model.
            log_path: file that gets LiteLLM's output of this run (0600); that of the run before is kept beside it.
            env_file: where a made master key is kept.
        """
        self._settings = settings
        self._server_url = server_url
        self._model_id = model_id
        self._card = card
        self.log_path, self._env_file = log_path, env_file
        self.elsewhere: Mapping[str, str] = {}  # other providers' models by name; to be told before `start`
        self._log_begun = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._folder: Path | None = None
        self._port = settings.proxy_port

    @property
    def url(self) -> str:
        """Where clients connect, without ``/v1``. The port is known once `start` has returned."""
        return address(self._settings.mlx_host, self._port)

    @cached_property
    def master_key(self) -> str:
        """The key that clients send; made and kept in `env_file` if there was none."""
        return proxy_config.master_key(self._settings, self._env_file)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts LiteLLM and returns at once; `wait_ready` tells when it answers.

        A free port that was picked once is kept: clients know it.

        Raises:
            ProxyError: LiteLLM is not installed, the port is taken, or a file cannot be written.
        """
        with self._lock:
            if self.alive():
                return
            if not is_installed("litellm"):
                raise ProxyError(missing("litellm"))
            host = self._settings.mlx_host
            if self._port:
                _wait_for_port(host, self._port)
            else:
                self._port = free_port(host)
            try:
                self._launch()
            except OSError as error:
                self._clean()
                raise ProxyError(f"it cannot be started: {error}") from error

    def _launch(self) -> None:
        """Writes the configurations into a new folder, and starts the process with it. Raises OSError."""
        names = {"server_url": self._server_url, "model_id": self._model_id, "master_key": self.master_key}
        config = proxy_config.proxy_config(self._settings, **names, card=self._card)
        self._folder = Path(tempfile.mkdtemp(prefix="start_llm-proxy-"))  # 0700
        config["model_list"] += entries(self.elsewhere, self._settings.sse_ping_seconds * proxy_config.PING_SHARE)
        additions = proxy_config.additions(self._settings, self._server_url, self.master_key)
        additions["elsewhere"] = self.elsewhere
        proxy_config.write_config(self._folder, config, additions)
        self._process = self._spawn(self._folder)

    def _spawn(self, folder: Path) -> subprocess.Popen[bytes]:
        """Starts `child` with the files in `folder`; the pipe that ends it with this process stays open here."""
        log = begin_log(self.log_path, go_on=self._log_begun)
        self._log_begun = True
        read, self._pipe = os.pipe()
        command = [sys.executable, "-P", "-m", MODULE, str(read), str(folder), "--"]
        command += ["--config", str(folder / proxy_config.CONFIG), "--host", self._settings.mlx_host]
        command += ["--port", str(self._port), "--num_workers", "1"]
        environment = proxy_config.proxy_environment(os.environ, self._settings.node_addresses)
        try:
            return subprocess.Popen(
                command,
                env=environment | {"PYTHONPATH": python_path()},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(read,),
                start_new_session=True,
            )
        finally:
            os.close(read)
            os.close(log)

    def wait_ready(self, seconds: float) -> bool:
        """Waits until the health route answers; False after `seconds`, or as soon as the process has ended."""
        return wait_until(lambda: not self.alive() or self.healthy(), seconds) and self.alive()

    def healthy(self) -> bool:
        """Whether the health route answers now (at most 2 s)."""
        return ask_json(f"{self.url}/health/readiness", seconds=2)[0] == 200

    def alive(self) -> bool:
        """Whether the process runs (it may not answer yet)."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends the proxy and everything it started; returns when it is gone. Harmless when it does not run."""
        with self._lock:
            process = self._process
            if process is not None:
                if process.poll() is None:
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_STOP_SECONDS)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader if anything is left in it
                process.wait()
                self._process = None
            self._clean()

    def trim_log(self) -> None:
        """Keeps the log of a long run short."""
        trim_log(self.log_path, _LOG_BYTES)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of LiteLLM's output, for an error message."""
        return last_lines(self.log_path, lines)

    def _clean(self) -> None:
        """Closes the pipe, which ends the child if it still runs, and removes its folder."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _wait_for_port(host: str, port: int) -> None:
    """Returns once `port` can be bound: a proxy of ours whose server has ended is about to end, too (`child`).

    Raises ProxyError: somebody else has it.
    """
    if is_free(host, port):
        return
    whose = who_listens(port)  # takes its time, and names nobody where the proxy ends meanwhile
    ours = MODULE in whose
    if not wait_until(lambda: is_free(host, port), _STOP_SECONDS if ours else 0):
        raise ProxyError(
            f"PROXY_PORT={port} is taken by {'the proxy of another start_llm server' if ours else whose}. "
            "It was left alone. PROXY_PORT=0 takes a free port, PROXY=off does without."
        )
