"""Fetches one model at a time in the background, for the page."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from start_llm.core.errors import BadRequest, Conflict
from start_llm.models.checkpoint import CheckpointError, architectures, check_source, is_path, read_config
from start_llm.models.pull import PullError, pull
from start_llm.models.recommended import SHORT_NAMES, full_name

log = logging.getLogger(__name__)

MOST_CHARS = 200
TELL_SECONDS = 0.25


class _Stopped(Exception):
    """Somebody has asked for the end; what is here stays for the next try."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """``running``, ``done``, ``failed`` or ``stopped``; `part`: what is here, 0 to 1; `detail`: a sentence."""

    name: str
    state: str
    part: float = 0.0
    detail: str = ""


class Pulls:
    """Thread-safe. `changed` is called when there is something new to show."""

    def __init__(self, changed: Callable[[], None], fetch: Callable[..., Any] = pull) -> None:
        self._changed, self._fetch = changed, fetch
        self._lock = threading.Lock()
        self._now: Fetch | None = None
        self._stop = threading.Event()
        self._told = 0.0

    def state(self) -> dict[str, Any] | None:
        """The running fetch or the last one."""
        now = self._now
        return None if now is None else asdict(now)

    def begin(self, name: str) -> None:
        """Raises BadRequest for what is no model's name, Conflict while another is fetched."""
        name = name.strip()
        if not name or len(name) > MOST_CHARS or is_path(name):
            raise BadRequest(
                f"name={name[:MOST_CHARS]!r}: give a repository (owner/name) or a short name.", param="name"
            )
        repository = full_name(name) or name
        try:
            check_source(repository, command="start-llm", known=SHORT_NAMES)
        except CheckpointError as error:
            raise BadRequest(str(error).replace("MODEL_PATH=", "name="), param="name") from None
        with self._lock:
            if self._now is not None and self._now.state == "running":
                raise Conflict(f"{self._now.name} is being fetched; stop that or wait for it.")
            self._stop.clear()
            self._now = Fetch(repository, "running")
        threading.Thread(target=self._run, args=(repository,), name="pull", daemon=True).start()
        self._changed()

    def stop(self) -> None:
        """The running fetch ends at its next piece; the next try goes on from there."""
        self._stop.set()

    def _run(self, name: str) -> None:
        try:
            done = self._fetch(name, self._progress, check=_checked)
        except _Stopped:
            self._set(state="stopped", detail="Stopped; the next try goes on from there.")
        except (PullError, CheckpointError) as error:
            self._set(state="failed", detail=str(error))
        except Exception as error:  # the thread's edge
            log.warning("fetching %s failed", name, exc_info=True)
            self._set(state="failed", detail=f"{type(error).__name__}: {error}")
        else:
            self._set(state="done", part=1.0, detail=f"{done.size / 1e9:.2f} GB at {done.commit[:12]}.")

    def _progress(self, step: str, part: float) -> None:
        if self._stop.is_set():
            raise _Stopped
        now = time.monotonic()
        if now - self._told >= TELL_SECONDS:
            self._told = now
            self._set(part=round(part, 4))

    def _set(self, **changes: Any) -> None:
        with self._lock:
            if self._now is not None:
                self._now = replace(self._now, **changes)
        self._changed()


def _checked(folder: Path) -> None:
    """Refuses an architecture that cannot be served before its large files are fetched."""
    config, known = read_config(folder), architectures()
    kind = config.get("model_type")
    if known and kind not in known and not config.get("model_file"):
        raise CheckpointError(f"mlx-lm does not know the architecture {kind!r}, so it was not fetched.")
