"""The parent of a server in the background: starts it again when it dies, and remembers why.

One thread, one loop over what the engine tells, signals and time. The engine ends when this process does, however it
does, because its standard input closes then; and the proxy ends with the engine in the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from start_llm.core.errors import ExitCode
from start_llm.core.settings import Settings
from start_llm.files.logs import begin_log, last_lines, trim_log
from start_llm.host.home import module_command
from start_llm.host.processes import created
from start_llm.service.place import Exit, Place, ServerState

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each restart in a row; as many restarts as there are pauses
STABLE_SECONDS = 600.0  # an engine that has lived this long is sound: its next end counts as the first
STOP_SECONDS = 70.0  # a server that was asked to end has ended by then, or is killed
TRIM_SECONDS = 60.0
LOG_BYTES = 16 << 20
WORDS = 5  # lines of the log that are kept as an engine's last words
_NO_USE = frozenset({ExitCode.NOT_STARTED, ExitCode.BAD_SETTING})


def main(settings: Settings, options: argparse.Namespace) -> int:
    """The process behind `start`. Its output is the server's log."""
    place = Place(settings)
    if not place.lock.take():
        print(f"A server of this user runs on port {place.port} already.", file=sys.stderr)
        return ExitCode.BAD_SETTING
    log = begin_log(place.log)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        return Supervisor(place, module_command("serve", "--supervised"), options.flags).run()
    except OSError as error:
        _say(str(error))
        return ExitCode.NOT_STARTED
    finally:
        place.lock.drop()


class Supervisor:
    """Holds the lock of `place` while it runs.

    Args:
        command: runs the engine, in supervised mode.
        flags: settings that the user gave as flags; they are remembered.
    """

    def __init__(self, place: Place, command: Sequence[str], flags: dict[str, str] | None = None) -> None:
        self._place = place
        self._command = list(command)
        self._engine: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._ending, self._kill_at = False, math.inf
        self._trim_at = time.monotonic() + TRIM_SECONDS
        self._log_from = 0
        pid = os.getpid()
        self._state = ServerState(pid, created(pid), since=time.time(), flags=flags or {})

    def run(self) -> int:
        """Until the server has ended for good; the exit code says how. The process's own: it takes its signals."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # the loop is woken by the descriptor
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(read, selectors.EVENT_READ, "signal")
        try:
            return self._supervise(read)
        finally:
            self._kill()

    def _supervise(self, signals: int) -> int:
        failures, ever_ready = 0, False
        while True:
            self._start()
            began = time.monotonic()
            ready, code = self._watch(signals)
            ever_ready = ever_ready or ready
            if self._ending or code == ExitCode.ENDED:
                self._place.forget()
                return ExitCode.ENDED
            words = last_lines(self._place.log, WORDS, self._log_from)
            self._tell(engine=None, model="", proxy_url=None, last_exit=Exit(code, time.time(), words))
            failures = 1 if time.monotonic() - began >= STABLE_SECONDS else failures + 1
            hopeless = code in _NO_USE and not ever_ready
            if hopeless or failures > len(PAUSES):
                _say(f"{'' if hopeless else f'{failures} times in a row '}{how(code)}: given up")
                self._tell(phase="gave up")
                return code if code > 0 else ExitCode.NOT_STARTED
            pause = PAUSES[failures - 1]
            _say(f"{how(code)}; another start in {pause:g} s ({failures} of {len(PAUSES)})")
            self._tell(phase="waiting")
            if self._selector.select(pause):  # nothing but signals in a pause
                self._place.forget()
                return ExitCode.ENDED
            self._tell(restarts=self._state.restarts + 1)

    def _start(self) -> None:
        with suppress(OSError):
            self._log_from = self._place.log.stat().st_size
        pipe = subprocess.PIPE
        self._engine = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, process_group=0)
        self._tell(phase="starting", engine=self._engine.pid)

    def _watch(self, signals: int) -> tuple[bool, int]:
        """Whether the engine was ever ready, and its exit code, once it has ended."""
        engine = self._engine
        assert engine is not None and engine.stdout is not None and engine.stdin is not None
        self._selector.register(engine.stdout, selectors.EVENT_READ, "engine")
        ready, unread, alive = False, b"", True
        while alive:
            for key, _ in self._selector.select(max(0.0, min(self._trim_at, self._kill_at) - time.monotonic())):
                if key.data == "signal":
                    os.read(signals, 64)
                    self._end()
                elif data := os.read(engine.stdout.fileno(), 65_536):
                    *lines, unread = (unread + data).split(b"\n")
                    for line in lines:
                        ready = self._hear(line.decode("utf-8", "replace")) or ready
                else:
                    alive = False
            self._on_time()
        self._selector.unregister(engine.stdout)
        code = self._reap(engine)
        engine.stdout.close()
        with suppress(OSError):
            engine.stdin.close()
        self._engine = None
        return ready, code

    def _reap(self, engine: subprocess.Popen[bytes]) -> int:
        """An engine that has closed its output is about to end; one that does not is killed."""
        try:
            return engine.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return engine.wait()

    def _hear(self, line: str) -> bool:
        """Takes what the engine tells; True if it is ready."""
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "ready":
                self._tell(phase="ready", model=str(event.get("model", "")), proxy_url=event.get("proxy_url"))
                return True
        return False

    # --- ending ---

    def _end(self) -> None:
        """Asks the engine to end; the second time it is killed."""
        engine = self._engine
        if engine is None:
            return
        if self._ending:
            self._kill()
            return
        self._ending = True
        self._kill_at = time.monotonic() + STOP_SECONDS
        self._tell(phase="ending")
        with suppress(OSError):
            assert engine.stdin is not None
            engine.stdin.write(json.dumps({"command": "stop"}).encode() + b"\n")
            engine.stdin.flush()

    def _kill(self) -> None:
        if self._engine is not None and self._engine.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._engine.pid, signal.SIGKILL)

    def _on_time(self) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill()
            self._kill_at = math.inf
        if now >= self._trim_at:
            trim_log(self._place.log, LOG_BYTES)
            self._trim_at = now + TRIM_SECONDS

    # --- telling ---

    def _tell(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        try:
            self._place.write(self._state)
        except OSError as error:
            _say(f"the state cannot be written: {error}")


def _say(line: str) -> None:
    print(f"supervisor: {line}", flush=True)


def how(code: int) -> str:
    """An exit code in words."""
    known = {
        int(ExitCode.NOT_STARTED): "it could not start",
        int(ExitCode.BAD_SETTING): "a setting is wrong",
        int(ExitCode.ENGINE_DIED): "the model thread died",
        int(ExitCode.WEDGED): "the model did not move",
    }
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"{known.get(code, 'it ended')} (exit code {code})"
