"""Starting, joining and stopping a server in the background, as `start`, `stop` and `launch` do."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from start_llm.core.errors import Explained
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.dashboard.tables import words_only
from start_llm.host.hints import hint
from start_llm.host.home import home, made_home, module_command, python_path
from start_llm.host.ports import ask_json, is_free, who_listens
from start_llm.host.processes import POLL_SECONDS, running, wait_until
from start_llm.service.place import Place
from start_llm.service.supervisor import STOP_SECONDS, how

Say = Callable[[str], None]
ASK_SECONDS = 2.0
GONE_SECONDS = 10.0
STARTUP_SECONDS = 3600.0  # a first start downloads the model


class ServiceError(Explained):
    """The server does not run as it should. The message says why and what to do."""


class NotRunning(ServiceError):
    """There is no server; the exit code is the one of init scripts."""

    exit_code = 3


def answers(place: Place) -> bool:
    """Whether a server on this port is ready for requests."""
    return ask_json(f"{place.url}/health", seconds=ASK_SECONDS)[0] == 200


def spawn(settings: Settings, place: Place, flags: dict[str, str], words: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a supervisor in a session of its own; it outlives this process.

    `words` gets what it says before it has the lock, and with it the log.
    """
    environment = dict(os.environ) | changed_settings(settings)
    environment |= {"MLX_PORT": str(place.port), "PYTHONPATH": python_path()}
    return subprocess.Popen(
        module_command("supervise", "--flags", json.dumps(flags)),
        env=environment,
        cwd=made_home(),
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        start_new_session=True,
    )


def bring_up(settings: Settings, place: Place, flags: dict[str, str], say: Say) -> bool:
    """Returns once a server answers on the port: one that runs, one that is starting, or a new one.

    Returns whether it was started here. `say` is told what goes on, a line at a time, the server's own words included.
    Raises ServiceError: it does not come up, or the port belongs to something else.
    """
    for _ in range(3):
        if place.is_running:
            if _join(place, say):
                return False
        elif (answer := ask_json(f"{place.url}/health", seconds=ASK_SECONDS))[0]:
            _join_unknown(place, answer[1])
            return False
        else:
            _begin(settings, place, flags, say)
            return True
    raise ServiceError(f"The server on port {place.port} ends again and again; see {place.log}.")


def _begin(settings: Settings, place: Place, flags: dict[str, str], say: Say) -> None:
    if not is_free(place.host, place.port):
        raise ServiceError(f"MLX_PORT={place.port} is in use by {who_listens(place.port)}; set another port.")
    say(f"starting the server on port {place.port}; its log: {place.log}")
    with tempfile.TemporaryFile() as words:
        child = spawn(settings, place, flags, words)
        follower = Follower(place.log, say)

        def over() -> bool:  # one that lost the race for the lock has ended, and another one has it
            if place.is_running:
                follower.look()
            return child.poll() is not None and not place.is_running

        try:
            came = _answers_before(place, over)
        except KeyboardInterrupt:
            say(f"the server goes on starting; `{hint('stop', place.port)}` ends it")
            raise
        follower.look()
        if not came:
            raise ServiceError(_why_not(place, words))


def _why_not(place: Place, words: IO[bytes]) -> str:
    """Why a server that was started has ended. What its log says has been told."""
    words.seek(0)
    if said := words.read().decode("utf-8", "replace").strip():
        return f"The server did not come up: {said}"
    state = place.read()
    why = f" ({how(state.last_exit.code)})" if state is not None and state.last_exit is not None else ""
    return f"The server did not come up{why}; its log: {place.log}"


def _join(place: Place, say: Say) -> bool:
    """Waits for a server that is starting; False if it ends instead."""
    if not answers(place):
        say(f"waiting for the server on port {place.port}; its log: {place.log}")
    return _answers_before(place, lambda: not place.is_running)


def _join_unknown(place: Place, body: Any) -> None:
    """A server that is not in our books, perhaps of another user. `body`: of its ``/health``."""
    if not (isinstance(body, dict) and ("state" in body or "status" in body)):
        raise ServiceError(
            f"MLX_PORT={place.port} is taken by something that is no start_llm server; set another port."
        )
    _answers_before(place, lambda: False)


def _answers_before(place: Place, over: Callable[[], bool]) -> bool:
    """Whether the server answers before it is `over`. Raises ServiceError if neither happens in time."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        if answers(place):
            state = place.read()
            # One of ours is ready once its state says so: its proxy, for instance, is told by then.
            if not place.is_running or (state is not None and state.phase == "ready"):
                return True
        if over():
            return False
        if time.monotonic() >= deadline:
            raise ServiceError(
                f"The server at {place.url} is not ready after {STARTUP_SECONDS:.0f} s; see {place.log}."
            )
        time.sleep(POLL_SECONDS)


class Follower:
    """Passes on what is added to a log, line by line, without what a terminal obeys: libraries quote clients and files
    in it. Of a bar that is drawn again and again, the last state."""

    def __init__(self, path: Path, say: Say, begin: int = 0) -> None:
        self._path, self._say = path, say
        self._at = begin  # the byte from which on it is passed on
        self._rest = ""

    def look(self) -> None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self._at if size >= self._at else 0)  # a shorter one was begun anew or trimmed
                data = file.read()
                self._at = file.tell()
        except OSError:
            return
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if text := line.rstrip().rsplit("\r", 1)[-1]:
                self._say(words_only(text))
        if "\r" in self._rest:  # a bar that goes on: its last whole state
            *_, state, self._rest = ["", *self._rest.rsplit("\r", 2)]
            if state.strip():
                self._say(words_only(state.strip()))


def stop(place: Place, seconds: float = STOP_SECONDS + 10) -> bool:
    """Ends the server of a port, and all that belongs to it; returns when it is gone.

    False if none of this user ran there. Raises ServiceError: something is left.
    """
    state = place.read()
    if not place.folder.is_dir():  # nothing ever ran; a folder that cannot be made need not be
        return False
    if place.lock.take():
        place.forget()
        place.lock.drop()
        return False
    process = running(state.pid, state.created) if state is not None else None
    if state is None or process is None:
        raise ServiceError(f"{place.folder}/server-{place.port}.json does not tell whose the lock beside it is.")
    members = family(process)
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    if not wait_until(lambda: not place.is_running, seconds):
        for member in family(process):
            with suppress(psutil.NoSuchProcess):
                member.kill()
    left = [each for each in psutil.wait_procs(members, timeout=GONE_SECONDS)[1] if not _is_zombie(each)]
    if left:
        raise ServiceError(f"Processes of the server on port {place.port} are left: {[each.pid for each in left]}.")
    if not wait_until(lambda: is_free(place.host, place.port), ASK_SECONDS):
        raise ServiceError(f"Port {place.port} is still in use by {who_listens(place.port)}.")
    place.forget()
    return True


def family(process: psutil.Process) -> list[psutil.Process]:
    """A server's processes, children first: engine and supervisor, the proxy and what they have started."""
    with suppress(psutil.NoSuchProcess):
        return [*process.children(recursive=True), process]
    return [process]


def _is_zombie(process: psutil.Process) -> bool:
    """Whether it has ended, and only its parent has not asked how yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def changed_settings(settings: Settings) -> dict[str, str]:
    """The settings that were given, as environment variables; relative paths made absolute."""
    changed = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if isinstance(value, Path):
            value = home() / expanded(value)
        elif name == "model_path" and value and Path(value).exists():
            value = Path(value).absolute()
        changed[name.upper()] = "off" if value is None else str(value)
    return changed
