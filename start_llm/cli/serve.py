"""The command `serve`: runs the server until somebody asks it to end, or it cannot go on.

Every end has its own exit code (`core.errors.ExitCode`), and comes soon, whatever a thread is stuck in: an interpreter
that shuts down under a thread inside MLX ends with an abort, so a process with such a thread leaves without that.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from start_llm.api.http.listener import raise_descriptor_limit
from start_llm.app import App
from start_llm.core.errors import ExitCode, Explained, StartLLMError
from start_llm.core.settings import Settings, SettingsError, doubtful_names
from start_llm.dashboard.process_log import json_line, log_as_json
from start_llm.dashboard.tables import words_only
from start_llm.dashboard.terminal import log_as_lines, make_console
from start_llm.host.awake import Awake
from start_llm.host.heap import bound_heaps
from start_llm.host.home import home
from start_llm.host.processes import created
from start_llm.prompt.clients import RuleError
from start_llm.service.place import Place, ServerState, end_when_unused
from start_llm.service.wire import Owner

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5


class _Asked(BaseException):
    """SIGINT, SIGTERM or SIGHUP has come."""


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP interrupts the main thread with `_Asked`, a second one ends the process at
    once."""

    def __init__(self) -> None:
        self.leaving = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the terminal's end is none
            signal.signal(signal.SIGHUP, self._on)

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self.leaving:
            _leave_now(128 + number)
        self.leaving = True
        raise _Asked


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Returns the process's exit code, or ends the process with it.

    Args:
        options: ``supervised``: the program that started this one listens (see `service.wire`); ``overrides``: settings
            that were given as flags.
    """
    if settings.log_json:
        log_as_json(settings.log_level)
    else:
        log_as_lines(settings.log_level)
    for doubt in doubtful_names(home() / ".env"):
        log.warning("%s", doubt)
    raise_descriptor_limit()
    bound_heaps()
    try:
        app = App(settings, console=make_console(stderr=settings.log_json))
        place = Place(settings, app.port)
        if not (options.supervised or place.lock.take()):
            raise SettingsError(f"MLX_PORT={app.port} belongs to a server that is being started; see its status.")
    except (Explained, RuleError) as error:
        _complain(str(error), settings)
        return ExitCode.BAD_SETTING
    signals = _Signals()
    try:
        tell_ready = _tell_owner(app) if options.supervised else _tell_disk(app, place, options.overrides)
        code = _run(app, place, settings, tell_ready)
        signals.leaving = True
    except _Asked:
        code = ExitCode.ENDED
    return _leave(app, place, code)


def _tell_owner(app: App) -> Callable[[], None]:
    """Tells the program that started this one by events; what is returned tells that the server is ready."""
    owner = Owner(app.service.health)
    owner.start()
    owner.tell("starting", pid=os.getpid(), url=app.server_url)

    def ready() -> None:
        card = app.service.models.cards()[0]
        owner.tell("ready", url=app.server_url, proxy_url=app.proxy_url, model=card.id, context=card.context)

    return ready


def _tell_disk(app: App, place: Place, flags: dict[str, str]) -> Callable[[], None]:
    """As `_tell_owner`, by a state beside the lock, for `status` and `stop`."""
    pid, now = os.getpid(), time.time()
    state = ServerState(pid, created(pid), background=False, since=now, engine=pid, flags=flags)
    place.write(state)
    return lambda: place.write(
        replace(state, phase="ready", model=app.service.models.cards()[0].id, proxy_url=app.proxy_url)
    )


def _run(app: App, place: Place, settings: Settings, tell_ready: Callable[[], None]) -> ExitCode:
    """Until the server cannot go on."""
    try:
        app.start()
    except StartLLMError as error:
        _complain(error.message, settings)
        return ExitCode.NOT_STARTED
    tell_ready()
    if settings.idle_shutdown_minutes:
        watched = (app.activity.idle_seconds, place, settings.idle_shutdown_minutes * 60, app.end)
        threading.Thread(target=end_when_unused, args=watched, name="idle-watch", daemon=True).start()
    if settings.keep_awake == "on":
        Awake(app.activity.idle_seconds).start()
    if settings.model_path is None:
        app.recommend()
    return app.wait()


def _leave(app: App, place: Place, code: int) -> int:
    """Stops the server, in bounded time."""
    late = threading.Timer(app.stop_seconds(), _leave_now, (code,))
    late.daemon = True
    late.start()
    ended = app.stop()
    late.cancel()
    if place.lock.is_held:
        place.forget()
        place.lock.drop()
    if not ended:
        _leave_now(code)
    return code


def _leave_now(code: int) -> None:
    """Ends the process; what was said goes out first, if anybody reads it."""
    late = threading.Timer(_FLUSH_SECONDS, os._exit, (code,))
    late.daemon = True
    late.start()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _complain(message: str, settings: Settings) -> None:
    """Why the server does not start, as the last thing that it says."""
    print(json_line(message, level="error") if settings.log_json else words_only(message), file=sys.stderr)
