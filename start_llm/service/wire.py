"""Supervised mode: JSON lines between a server and the program that started it. Documented in docs/operations.md.

The server tells events on standard output and takes commands on standard input; its own words go to standard error.
When standard input closes, the server ends: so none outlives the program that started it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from start_llm.core.service import Health

log = logging.getLogger(__name__)

_LONGEST_LINE = 65_536


class Owner:
    """The program at the other end of this process's standard input and output."""

    def __init__(self, health: Callable[[], Health]) -> None:
        """Takes standard output for events: what else is written there goes to standard error from now on."""
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._health = health
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, args=(sys.stdin,), name="owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: str, **more: Any) -> None:
        """Writes an event. An owner that has gone is told nothing more."""
        try:
            with self._lock:
                self._out.write(json.dumps({"event": event} | more, ensure_ascii=False) + "\n")
                self._out.flush()
        except (OSError, ValueError):
            log.debug("nobody reads the event %s", event)

    def _listen(self, commands: IO[str]) -> None:
        """Until the owner closes its end, then asks this process to end."""
        while line := commands.readline(_LONGEST_LINE):
            if line.strip():
                self._obey(line)
        os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, line: str) -> None:
        try:
            command = json.loads(line)["command"]
        except (ValueError, KeyError, TypeError):
            self.tell("error", message=f'a command is a line like {{"command": "status"}}, not {line.strip()[:80]!r}')
            return
        if command == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif command == "status":
            self.tell("status", **asdict(self._health()))
        else:
            self.tell("error", message=f"command={command!r}: allowed are status and stop")
