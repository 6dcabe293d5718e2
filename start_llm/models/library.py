"""What is done with the models on this disk while a server runs: fetched in the background, removed, given values.

Knows no MLX.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from start_llm.core.errors import BadRequest, Conflict, NotFound
from start_llm.core.service import Service
from start_llm.core.sizes import as_size
from start_llm.host.home import command
from start_llm.models.catalog import folder_of
from start_llm.models.checkpoint import CheckpointError, check_library, check_source, is_path, read_config
from start_llm.models.overrides import FOLDER, write_overrides
from start_llm.models.pull import PullError, pull, removable, remove
from start_llm.models.recommended import SHORT_NAMES, full_name

log = logging.getLogger(__name__)

MOST_CHARS = 200  # of a model's name
TELL_SECONDS = 0.25


class _Stopped(Exception):
    """Somebody has asked for the end; what is here stays for the next try."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """``running``, ``done``, ``failed`` or ``stopped``; `part` of `bytes` is here, 0 to 1; `detail`: a sentence."""

    name: str
    state: str
    part: float = 0.0
    bytes: int = 0
    detail: str = ""


class Pulls:
    """Fetches one model at a time. Thread-safe. `changed` is called when there is something new to show."""

    def __init__(self, changed: Callable[[], None], fetch: Callable[..., Any] = pull) -> None:
        self._changed, self._fetch = changed, fetch
        self._lock = threading.Lock()
        self._now: Fetch | None = None
        self._stop = threading.Event()
        self._reported_at = 0.0

    def state(self) -> dict[str, Any] | None:
        """The running fetch or the last one."""
        now = self._now
        return None if now is None else asdict(now)

    def begin(self, name: str) -> str:
        """The repository that is fetched now. Raises BadRequest: that is no model's name; Conflict: one is fetched."""
        name = name.strip()
        if not name or len(name) > MOST_CHARS or is_path(name):
            what = "give a repository (owner/name) or a short name."
            raise BadRequest(f"name={name[:MOST_CHARS]!r}: {what}", param="name")
        repository = full_name(name) or name
        try:
            check_source(repository, command=command(), known=SHORT_NAMES)
        except CheckpointError as error:
            raise BadRequest(str(error).replace("MODEL_PATH=", "name="), param="name") from None
        with self._lock:
            if self._now is not None and self._now.state == "running":
                raise Conflict(f"{self._now.name} is being fetched; stop that or wait for it.")
            self._stop.clear()
            self._now = Fetch(repository, "running")
        threading.Thread(target=self._run, args=(repository,), name="pull", daemon=True).start()
        self._changed()
        return repository

    def stop(self, name: str | None = None) -> None:
        """The running fetch, if it is that of `name`, ends at its next piece; the next try goes on from there."""
        with self._lock:
            if name is None or (self._now is not None and self._now.name == name):
                self._stop.set()

    def _run(self, name: str) -> None:
        try:
            done = self._fetch(name, self._progress, check=_checked, sized=lambda size: self._set(bytes=size))
        except _Stopped:
            self._set(state="stopped", detail="Stopped; the next try goes on from there.")
        except (PullError, CheckpointError) as error:
            self._set(state="failed", detail=str(error))
        except Exception as error:  # the thread's edge
            log.warning("fetching %s failed", name, exc_info=True)
            self._set(state="failed", detail=f"{type(error).__name__}: {error}")
        else:
            self._set(state="done", part=1.0, detail=f"{as_size(done.size)} at {done.commit[:12]}.")

    def _progress(self, step: str, part: float) -> None:
        if self._stop.is_set():
            raise _Stopped
        now = time.monotonic()
        if part >= 0 and now - self._reported_at >= TELL_SECONDS:
            self._reported_at = now
            self._set(part=round(part, 4))

    def _set(self, **changes: Any) -> None:
        with self._lock:
            if self._now is not None:
                self._now = replace(self._now, **changes)
        self._changed()


def _checked(folder: Path) -> None:
    """Refuses an architecture that cannot be served before its large files are fetched."""
    check_library("It was not fetched: ", read_config(folder))


@dataclass(frozen=True, slots=True)
class Library:
    """Thread-safe as far as `service` is."""

    service: Service
    pulls: Pulls
    # names of settings by the models that they name and `service` does not list; these stay
    used: Mapping[str | None, str] = field(default_factory=dict)
    check: Callable[[str], None] = lambda source: None  # raises Conflict for a model that another server needs

    def source(self, asked: str) -> str:
        """The repository or folder of a model that clients call so; any other name as it is, a short one written out.

        MODEL_MAP has no say: who removes ``gpt-5`` does not mean the model that answers for it.
        """
        cards = [card for card in self.service.models.cards() if "adapter" not in card.details]
        named = (str(card.details["source"]) for card in cards if card.id == asked and "source" in card.details)
        return next(named, None) or full_name(asked) or asked

    def remove(self, asked: str) -> tuple[str, int]:
        """Unloads a model that came from a hub, and removes its files. Its repository, and the bytes that are free
        again. Raises NotFound; Conflict: it must stay, and why.
        """
        source = self.source(asked)
        cards = [card for card in self.service.models.cards() if card.details.get("source") == source]
        if cards and self.service.models.cards()[0] in cards:
            raise Conflict(f"{source} is the model that this server was started with; start it with another one first.")
        if source in self.used:
            raise Conflict(f"{self.used[source]} names {source}; start this server without that first.")
        try:
            removable(source)
            self.check(source)
            for card in cards:
                if card.state not in {"stored", "failed"}:
                    self.service.models.unload(card.id)
            return source, remove(source)
        except PullError as error:
            kind = Conflict if cards or is_path(source) else NotFound
            raise kind(str(error), param="model") from error

    def change(self, asked: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Writes values into the model's own file; ``None`` takes one out. What the file says then. Raises NotFound,
        NotSupported: nothing is written, and why.
        """
        source = self.source(asked)
        cards = [card for card in self.service.models.cards() if card.details.get("source") == source]
        folder = folder_of(source)
        if not cards and (folder is None or not (folder / "config.json").is_file()):
            raise NotFound(f"{asked[:MOST_CHARS]!r} is no model that this server has.", param="name")
        written = write_overrides(FOLDER, source, changes)
        if "pinned" in changes:
            for card in cards:
                self.service.models.pin(card.id, bool(changes["pinned"]))
        return dict(written.values)
