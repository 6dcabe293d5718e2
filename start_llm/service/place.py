"""What is known on disk of the server of one port: its lock, its state, and who uses it.

All lies in ``START_LLM_CACHE_DIR/run``. Locks are what counts: the system drops them with their holder. A state without
a held lock tells how the last server ended.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from start_llm.core.errors import Explained
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.files.atomic import write_atomic
from start_llm.files.locks import FileLock, is_locked
from start_llm.host.home import home
from start_llm.host.ports import address
from start_llm.models.servers import running_ports

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
Phase = Literal["starting", "ready", "waiting", "ending", "gave up"]
_LONGEST_STATE = 1 << 20


@dataclass(frozen=True)
class Exit:
    """How an engine process ended: its exit code (negative: the signal), when (unix seconds), its last words."""

    code: int
    time: float
    words: str = ""


@dataclass(frozen=True)
class ServerState:
    """What the holder of the lock tells of itself: the supervisor, or a server in the foreground."""

    pid: int
    created: float  # as psutil tells it
    background: bool = True  # whether a supervisor holds the lock
    since: float = 0.0  # unix seconds at which this server was started
    phase: Phase = "starting"  # ``waiting`` is the pause before another try
    engine: int | None = None  # process id of the server proper
    model: str = ""
    proxy_url: str | None = None
    flags: dict[str, str] = field(default_factory=dict)  # settings that were given as flags, for `restart`
    restarts: int = 0
    last_exit: Exit | None = None  # of the engine, if it has ended before


_STATE = TypeAdapter(ServerState)  # leaves out fields that it does not know, of a newer version


class Place:
    """The files of the server of `port`. Any process may read; only the holder of the lock writes the state."""

    def __init__(self, settings: Settings, port: int | None = None) -> None:
        """`port`: MLX_PORT by default."""
        self.settings = settings
        self.port = settings.mlx_port if port is None else port
        self.host = settings.mlx_host
        self.url = address(self.host, self.port)
        self.log = home() / expanded(settings.log_root) / f"server-{self.port}.log"
        self.folder = home() / settings.cache_dir / "run"
        self._lock_path, self._state_path, self._keep_path = (
            self.folder / f"server-{self.port}.{ending}" for ending in ("lock", "json", "keep")
        )
        self._users = self.folder / f"users-{self.port}"
        self.lock = FileLock(self._lock_path)

    @property
    def is_running(self) -> bool:
        """Whether somebody holds the lock."""
        return is_locked(self._lock_path)

    # --- state ---

    def read(self) -> ServerState | None:
        """What was written last, by whoever runs or ran; ``None`` if there is nothing that can be read."""
        try:
            return _STATE.validate_json(_read_own(self._state_path))
        except (OSError, ValueError):
            return None

    def write(self, state: ServerState) -> None:
        """By an atomic rename, for this user only (0600). Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._state_path, json.dumps(asdict(state), indent=1))

    def forget(self) -> None:
        """Removes the state, and what kept the server alive."""
        for path in (self._state_path, self._keep_path):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self._users.rmdir()

    # --- who uses it ---

    def keep(self) -> None:
        """The server stays, also when nobody uses it: somebody has started it by name."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._keep_path.touch(0o600, exist_ok=False)

    def forget_keep(self) -> None:
        """Nobody has started it by name after all."""
        self._keep_path.unlink(missing_ok=True)

    @property
    def is_kept(self) -> bool:
        return self._keep_path.exists()

    @contextmanager
    def used(self) -> Iterator[None]:
        """This process is a user of the server for as long as the block runs, or until it ends, however it ends."""
        user = FileLock(self._users / str(os.getpid()))
        user.take()
        try:
            yield
        finally:
            user.drop()

    def users(self) -> int:
        """How many processes use it now. What killed processes have left is removed."""
        count = 0
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in list(self._users.iterdir()):
                if is_locked(path):
                    count += 1
                else:
                    path.unlink(missing_ok=True)
        return count


def end_when_unused(
    idle_seconds: Callable[[], float],
    place: Place,
    seconds: float,
    end: Callable[[], None],
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Calls `end` once there was no request for `seconds`, no agent is connected, and the server is not to stay.

    Needs a thread of its own. `idle_seconds`: seconds since the last request.
    """
    unused_since = time.monotonic()
    while min(idle_seconds(), time.monotonic() - unused_since) < seconds:
        time.sleep(min(look_seconds, max(seconds / 4, 0.02)))
        if place.is_kept or place.users():
            unused_since = time.monotonic()
    log.warning("nobody has used the server for %.0f s: it ends", seconds)
    end()


def _read_own(path: Path) -> bytes:
    """A file of this user, no link and no pipe: what it says decides which process is ended. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        return opened.read(_LONGEST_STATE)


def port_of_one(settings: Settings, flags: Mapping[str, Any], *, must_be_one: bool) -> int:
    """MLX_PORT, or the port of the one server of this user that runs, if none runs on MLX_PORT and nobody has named a
    port now (by a flag, or for this shell). Raises Explained where it `must_be_one`: several run, on other ports."""
    if "mlx_port" in flags or "MLX_PORT" in os.environ:
        return settings.mlx_port
    ports = running_ports(settings)
    if must_be_one and len(ports) > 1 and settings.mlx_port not in ports:
        several = ", ".join(str(port) for port in ports)
        raise Explained(f"Servers of yours run on the ports {several}: name one, as in --port {ports[0]}.")
    return ports[0] if len(ports) == 1 else settings.mlx_port
