"""By which names the models on this disk may be asked for. Nothing else is ever loaded. Knows no MLX."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from start_llm.core.modelmap import ADAPTER_SIGN, MOST_NAME
from start_llm.core.settings import Settings
from start_llm.models.adapter import StoredAdapter
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel, describe, folder_of, seen, stored_models
from start_llm.models.recommended import SHORT_NAMES, full_name
from start_llm.models.room import group_of

log = logging.getLogger(__name__)

LISTING_SECONDS = 10.0
"""How old a listing may be that is shown."""
LEAST_SECONDS = 2.0
"""How often it is made anew for names that are not in it."""
SEEN_SECONDS = 1.0
"""How often it is looked whether models have come or gone."""
PATIENCE_SECONDS = 5.0
"""For a listing that another thread makes: its disk may hang. Then the last one counts."""

DEFAULT_KEY = ""
"""The default model's `entry_key`, whatever folder it has."""
SideTask = Literal["transcription", "speech", "embedding"]
SIDE_TASKS: tuple[SideTask, ...] = get_args(SideTask)

_ADAPTED = "//"  # stands in no folder's key


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on this disk.

    Attributes:
        key: its folder, links resolved: two names of one folder are one model.
        name: what clients see; `source`: the repository or folder that it is.
        aliases: all that it may be asked for by.
        stored: its size, context and the like.
        adapter: it is served with this one. `base` is then its name without.
        default: the model that the server was started with.
    """

    key: str
    name: str
    source: str
    aliases: frozenset[str]
    stored: StoredModel
    adapter: StoredAdapter | None = None
    base: str = ""
    default: bool = False

    @property
    def task(self) -> SideTask | None:
        """Of a model that is no language model."""
        return next((task for task in SIDE_TASKS if task in self.stored.can), None)

    @property
    def is_reserved(self) -> bool:
        """Its memory was set aside at the start: it goes for nobody, and nobody for it. Its service lists it."""
        return self.task == "embedding"

    @property
    def entry_key(self) -> str:
        """Its name in the pool and on the model thread."""
        return DEFAULT_KEY if self.default else self.key

    def with_adapter(self, adapter: StoredAdapter) -> KnownModel:
        """The same model with an adapter."""
        key = f"{self.key}{_ADAPTED}{adapter.name}"
        name = f"{self.name}{ADAPTER_SIGN}{adapter.name}"
        names = (adapter.name, *adapter.links)
        aliases = frozenset(f"{alias}{ADAPTER_SIGN}{each}" for alias in self.aliases for each in names)
        return replace(self, key=key, name=name, aliases=aliases, adapter=adapter, base=self.name, default=False)

    @property
    def group(self) -> str:
        """The key of the model without an adapter: `weights.group_of` its folder, as it was when the disk was read."""
        return self.key if self.adapter is None else self.key.rpartition(_ADAPTED)[0]


class ModelListing:
    """The listing. Any thread. The default model is not in it, see `leave_out`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._left_out, self._left_out_names = "", frozenset[str]()
        self._lock = threading.Lock()
        self._known: tuple[KnownModel, ...] = ()
        self._by_alias: dict[str, KnownModel] = {}
        self._read = float("-inf")
        self._looking = threading.Lock()
        self._looked = float("-inf")
        self._seen: frozenset[tuple[str, int, int]] = frozenset()

    def leave_out(self, key: str, names: frozenset[str]) -> None:
        """From now on this model is not listed, and no other one is called as it is."""
        self._left_out, self._left_out_names = key, names
        self._refresh(0.0)

    def all(self) -> tuple[KnownModel, ...]:
        """At most `LISTING_SECONDS` old."""
        self._refresh(LISTING_SECONDS)
        return self._known

    def find(self, name: str, *, look: bool = True) -> KnownModel | None:
        """The model of that name. A path is one only if the settings name it or the listing does.

        Args:
            look: look at the disk again if it is not in the listing, whether models have come or not.
        """
        if not name or len(name) > MOST_NAME:
            return None
        self._notice()
        if look and name not in self._by_alias:
            self._refresh(LEAST_SECONDS)
        return self._by_alias.get(name)

    def _notice(self) -> None:
        """Makes the listing anew where models have come or gone: a name may mean another folder now."""
        if time.monotonic() - self._looked < SEEN_SECONDS or not self._looking.acquire(blocking=False):
            return
        try:
            now = seen(self._settings.cache_dir)
            self._looked = time.monotonic()
            if now != self._seen:
                self._refresh(0.0)
        finally:
            self._looking.release()

    def _refresh(self, seconds: float) -> None:
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            return
        try:
            if time.monotonic() - self._read < seconds:
                return
            now = seen(self._settings.cache_dir)  # first: what comes meanwhile is noticed later
            try:
                self._known = tuple(known_models(self._settings, self._left_out, self._left_out_names))
                self._seen = now
            except OSError as error:  # a file that was deleted, or a folder renamed, while it was looked at
                log.warning("the models on this disk cannot be listed now: %s", error)
            self._by_alias = {alias: known for known in reversed(self._known) for alias in known.aliases}
            self._read = time.monotonic()
        finally:
            self._lock.release()


def known_models(settings: Settings, left_out: str, taken_names: frozenset[str]) -> list[KnownModel]:
    """What the settings name comes first, so that its short name is the model's.

    Args:
        left_out, taken_names: key and names of a model that is left out.
    """
    found: dict[str, StoredModel] = {}
    for stored in [*_named(settings), *stored_models(settings.cache_dir)]:
        key = group_of(stored.folder)
        if key != left_out and not stored.problem:
            found.setdefault(key, stored)
    taken = set(taken_names)
    return [_known(key, stored, taken) for key, stored in found.items()]


def named_in(settings: Settings) -> list[str]:
    """Names of models that the settings tell of, each once."""
    targets = [entry.model for entry in settings.models_by_name.entries]
    audio = [name for name in (settings.transcription_model, settings.speech_model) if name]
    return list(dict.fromkeys([*settings.preloaded, *settings.pinned, *targets, *audio]))


def _named(settings: Settings) -> Iterable[StoredModel]:
    for name in named_in(settings):
        here = (Path(name).expanduser() / "config.json").is_file()
        model = name if here else name.rpartition(ADAPTER_SIGN)[0] or name  # its adapter lies elsewhere
        source = full_name(model) or model
        folder = folder_of(source)
        if folder is not None and (folder / "config.json").is_file():
            yield describe(source, folder)


def aliases_of(name: str, source: str) -> frozenset[str]:
    """What a model may be asked for by, beside its folder. `name`: what clients see; `source`: its repository."""
    short = (alias for alias, repository in SHORT_NAMES.items() if repository == source)
    return frozenset({name, source, f"openai/{name}", f"openai/{source}", *short})


def _known(key: str, stored: StoredModel, taken: set[str]) -> KnownModel:
    source = stored.name
    short = source.rstrip("/").rpartition("/")[2]
    if short.startswith(f"{EMBEDDED_NAME}-"):
        short = EMBEDDED_NAME
    name = source if short in taken else short
    taken.add(name)
    return KnownModel(key, name, source, aliases_of(name, source) | {key}, stored)
