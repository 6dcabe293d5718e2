"""The server behind a launched client: found running, or started as a child and ended again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from start_llm.core.settings import Settings
from start_llm.files.logs import begin_log, trim_log
from start_llm.host.home import home, made_home, module_command, python_path
from start_llm.host.ports import address, free_port, get_json

SERVER_COMMAND = module_command("serve")
_POLL_SECONDS = 0.1
_STOP_SECONDS = 15.0
_TRIM_SECONDS = 60.0
_LOG_BYTES = 16 << 20


class LaunchError(RuntimeError):
    """The client cannot be launched. The message says why and what to do."""


def from_root(path: Path) -> Path:
    """A path of the settings as the server takes it: it runs in `home`, the agent in the user's repository."""
    return home() / path.expanduser()


def wait_for(done: Callable[[], bool], alive: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive() and time.monotonic() < deadline:
        if done():
            return True
        time.sleep(_POLL_SECONDS)
    return False


@contextmanager
def running_server(settings: Settings, *, proxy: bool, seconds: float, log_path: Path) -> Iterator[tuple[str, int]]:
    """(server's url, proxy's port): a running server, or a child that ends with the block.

    Args:
        proxy: the server must have its proxy.
        seconds: how long a started server may take, model download included.
        log_path: file that gets the output of a started server, of this run only.

    Raises:
        LaunchError: it does not come up, or something else listens there.
    """
    url = address(settings.mlx_host, settings.mlx_port)
    status, body = get_json(f"{url}/health") if settings.mlx_port else (0, None)
    if status and not (isinstance(body, dict) and ("state" in body or "status" in body)):
        raise LaunchError(
            f"MLX_PORT={settings.mlx_port} is taken by something that is no start_llm server; set another port."
        )
    if status:
        if not wait_for(lambda: get_json(f"{url}/health")[0] == 200, lambda: True, seconds):
            raise LaunchError(f"The server at {url} is not healthy: {get_json(f'{url}/health')[1]}")
        yield url, settings.proxy_port
        return
    port = settings.mlx_port or free_port()
    proxy_port = settings.proxy_port or free_port()
    url = address(settings.mlx_host, port)
    child = _spawn(settings, port, proxy_port if proxy else None, log_path)
    try:
        if not wait_for(lambda: get_json(f"{url}/health")[0] == 200, lambda: child.poll() is None, seconds):
            raise LaunchError(f"The server did not come up; the end of {log_path}:\n{_tail(log_path)}")
        with _trimmed(log_path):
            yield url, proxy_port
    finally:
        _end(child)


@contextmanager
def _trimmed(log_path: Path) -> Iterator[None]:
    """Meanwhile a thread keeps the log from growing for ever."""
    over = threading.Event()

    def trim() -> None:
        while not over.wait(_TRIM_SECONDS):
            trim_log(log_path, _LOG_BYTES)

    thread = threading.Thread(target=trim, name="log-trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _spawn(settings: Settings, port: int, proxy_port: int | None, log_path: Path) -> subprocess.Popen[bytes]:
    environment = dict(os.environ) | changed_settings(settings)
    environment |= {"MLX_PORT": str(port), "PROXY": "off" if proxy_port is None else "on"}
    if proxy_port is not None:
        environment["PROXY_PORT"] = str(proxy_port)
    environment["PYTHONPATH"] = python_path()
    log = begin_log(log_path)
    try:
        # Its own session: a Ctrl-C in the client is not for the server. Its own folder: `.env` and logs are not the
        # client's business.
        return subprocess.Popen(
            SERVER_COMMAND,
            env=environment,
            cwd=made_home(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def changed_settings(settings: Settings) -> dict[str, str]:
    """The settings that were given, as environment variables; relative paths made absolute."""
    changed = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if isinstance(value, Path):
            value = from_root(value)
        elif name == "model_path" and value and Path(value).exists():
            value = Path(value).absolute()
        changed[name.upper()] = "off" if value is None else str(value)
    return changed


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
