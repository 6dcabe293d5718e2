"""Which model a request's name means: the main one, one on this disk, or none.

Exception: `api.table` routes side requests for the main model to the model of ``MODEL_MAP``'s ``@side``.

Nothing but the models that are listed here is ever loaded. Knows no MLX.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from start_llm.core.errors import BadRequest, NotFound, NotSupported
from start_llm.core.media import AudioTask
from start_llm.core.modelmap import ADAPTER_SIGN, MAIN_NAME, MOST_NAME
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.models.adapter import CONFIG, AdapterFolder, StoredAdapter, check_name, public_name, unusable
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel, describe, folder_of, seen, stored_models
from start_llm.models.checkpoint import SETTINGS
from start_llm.models.overrides import FOLDER, read_overrides
from start_llm.models.recommended import SHORT_NAMES, full_name
from start_llm.models.room import Weights, group_of
from start_llm.proxy.elsewhere import names_elsewhere

log = logging.getLogger(__name__)

# Names that clients are hard-wired to; where MODEL_MAP says nothing of them they mean the main model.
_FOREIGN_NAMES = re.compile(r"(claude|gpt|chatgpt|codex|o\d)([-.:].*)?$", re.IGNORECASE)
MAIN_NAMES = frozenset({"", MAIN_NAME})
_FOREIGN_AUDIO: dict[AudioTask, re.Pattern[str]] = {
    "transcription": re.compile(r"whisper-\d|gpt-4o(-mini)?-transcribe([-.].*)?"),
    "speech": re.compile(r"tts-\d(-hd)?|gpt-4o(-mini)?-tts([-.].*)?"),
}
"""OpenAI's names, which mean what the settings name."""
PATHS: dict[SideTask, str] = {"transcription": "transcriptions", "speech": "speech"}
_SHOWN = 12

LISTING_SECONDS = 10.0
"""How old a listing may be that is shown."""
LEAST_SECONDS = 2.0
"""How often it is made anew for names that are not in it."""
SEEN_SECONDS = 1.0
"""How often it is looked whether models have come or gone."""
PATIENCE_SECONDS = 5.0
"""For a listing that another thread makes: its disk may hang. Then the last one counts."""

DEFAULT_KEY = ""
"""The main model's `entry_key`, whatever folder it has."""
SideTask = Literal["transcription", "speech", "embedding"]
SIDE_TASKS: tuple[SideTask, ...] = get_args(SideTask)

_ADAPTED = "//"  # stands in no folder's key
_OWN_SETTINGS = {"thinking": "default_thinking", "ttl": "model_ttl_seconds"}
"""Keys of a model's own file that stand for settings."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on this disk."""

    key: str  # its folder, links resolved: two names of one folder are one model
    name: str  # what clients see
    source: str  # the repository or folder that it is
    aliases: frozenset[str]  # all that it may be asked for by
    stored: StoredModel
    adapter: StoredAdapter | None = None  # it is served with this one
    base: str = ""  # its name without the adapter
    default: bool = False  # the server was started with it

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
        key = f"{self.key}{_ADAPTED}{adapter.name}"
        name = f"{self.name}{ADAPTER_SIGN}{adapter.name}"
        names = (adapter.name, *adapter.links)
        aliases = frozenset(f"{alias}{ADAPTER_SIGN}{each}" for alias in self.aliases for each in names)
        return replace(self, key=key, name=name, aliases=aliases, adapter=adapter, base=self.name, default=False)

    @property
    def group(self) -> str:
        """The key of the model without an adapter: `room.group_of` its folder, as it was when the disk was read."""
        return self.key if self.adapter is None else self.key.rpartition(_ADAPTED)[0]

    @property
    def folder(self) -> Path:
        """What is loaded under its key: not what a link in its place leads to by then."""
        return self.stored.folder if self.is_reserved else Path(self.group)


class ModelListing:
    """All models on this disk by their names, except the main one (see `leave_out`). Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._left_out, self._left_out_names = "", frozenset[str]()
        self._lock = threading.Lock()  # of what follows; what is found may be read without it
        self._known: tuple[KnownModel, ...] = ()
        self._by_alias: dict[str, KnownModel] = {}
        self._seen: frozenset[tuple[str, int, int]] = frozenset()  # the folders' times, as of the listing
        self._read = self._looked = -math.inf  # when it was made, and when those were looked at

    def leave_out(self, key: str, names: frozenset[str]) -> None:
        """Hides this model from the listing and reserves its names: no other model gets one of them."""
        self._left_out, self._left_out_names = key, names
        self._refresh(0.0)

    def all(self) -> tuple[KnownModel, ...]:
        """At most `LISTING_SECONDS` old."""
        self._refresh(LISTING_SECONDS)
        return self._known

    def find(self, name: str, *, look: bool = True) -> KnownModel | None:
        """The model of that name. A path is one only if the settings name it or the listing does.

        `look`: look at the disk again if it is not in the listing, whether models have come or not.
        """
        if not name or len(name) > MOST_NAME:
            return None
        self._refresh()
        if look and name not in self._by_alias:
            self._refresh(LEAST_SECONDS)
        return self._by_alias.get(name)

    def look_again(self) -> None:
        """As it is on the disk now, even if that was looked at a moment ago, or another thread looks at it."""
        self._refresh(again=True)

    def _refresh(self, oldest: float = math.inf, *, again: bool = False) -> None:
        """Makes the listing anew if it is `oldest` seconds old, or models have come or gone: a name may mean another
        folder then. Who can do with the old one does not wait for another thread that looks at the disk.
        """
        if not self._lock.acquire(timeout=0.0 if oldest == math.inf and not again else PATIENCE_SECONDS):
            return
        try:
            now = time.monotonic()
            if now - self._read < oldest and now - self._looked < SEEN_SECONDS and not again:
                return
            there, self._looked = seen(self._settings.cache_dir), now  # first: what comes meanwhile is noticed later
            if now - self._read < oldest and there == self._seen:
                return
            try:
                self._known = tuple(known_models(self._settings, self._left_out, self._left_out_names))
                self._seen = there
            except OSError as error:  # a file that was deleted, or a folder renamed, while it was looked at
                log.warning("the models on this disk cannot be listed now: %s", error)
            self._by_alias = {alias: known for known in reversed(self._known) for alias in known.aliases}
            self._read = time.monotonic()
        finally:
            self._lock.release()


def known_models(settings: Settings, left_out: str, taken_names: frozenset[str]) -> list[KnownModel]:
    """Those that the settings name come first and have their short names. Without the one of the key `left_out`, whose
    names are `taken_names`.
    """
    found: dict[str, StoredModel] = {}
    for stored in [*_named(settings), *stored_models(settings.cache_dir)]:
        key = group_of(stored.folder)
        if key != left_out and not stored.problem:
            found.setdefault(key, stored)
    taken = set(taken_names)
    return [_known(key, stored, taken) for key, stored in found.items()]


def _named(settings: Settings) -> Iterable[StoredModel]:
    """Models that the settings tell of, as far as they are here."""
    targets = [entry.model for entry in settings.models_by_name.entries]
    audio = [name for name in (settings.transcription_model, settings.speech_model) if name]
    for name in dict.fromkeys([*settings.preloaded, *settings.pinned, *targets, *audio]):
        here = (expanded(name) / "config.json").is_file()
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


class NameResolver:
    """Any thread. What the `default` model is called, and where it lies, is known once it is loaded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.listing = ModelListing(settings)
        unknown = StoredModel(MAIN_NAME, Path(), 0, None, ())
        self.default = KnownModel("", MAIN_NAME, MAIN_NAME, MAIN_NAMES, unknown, default=True)
        self._table = settings.models_by_name
        self._elsewhere = names_elsewhere(self._table, folder_of)
        meant = {each for name in settings.pinned for each in (name, self._table.resolve(name), self._base_meant(name))}
        self._pinned = {full_name(name) or name for name in meant} | meant
        self._adapters = AdapterFolder(settings.adapters_folder)

    def default_loaded(self, name: str, source: str, folder: Path) -> None:
        """Says what the main model is called, and where it lies: only now, for it may just have been fetched.

        Again whenever it has been loaded anew: its repository may have another commit by then.
        """
        key, names = group_of(folder), aliases_of(name, source)
        self.listing.leave_out(key, names)
        self.default = KnownModel(key, name, source, MAIN_NAMES | names | {key}, describe(source, folder), default=True)

    def folder_now(self, known: KnownModel) -> Path:
        """Where the model lies now. Raises NotFound if it is not on this disk any more: nothing is fetched."""
        source = self._settings.model_path
        if not known.default or source is None:
            return known.folder
        found = folder_of(source)
        if found is None:
            raise NotFound(f"{known.name} cannot be loaded: {source} is not on this disk any more; fetch it again.")
        return found

    def meant(self, name: str) -> str:
        """MODEL_MAP's word on it. What a model itself is called always means that model."""
        if name in (self.default.name, self.default.source):
            return name
        listed = self.listing.find(name, look=False)
        return name if listed and name in (listed.name, listed.source) else self._table.resolve(name)

    def _base_meant(self, name: str) -> str:
        """MODEL_MAP's word on what stands before an adapter's name."""
        base, sign, adapter = name.rpartition(ADAPTER_SIGN)
        return f"{self._table.resolve(base)}{sign}{adapter}" if base else name

    def find(self, name: str) -> KnownModel:
        """The model that `name` means. A model's name may be followed by ``+`` and an adapter's name.

        Raises NotFound where the name means no model, or there is no such adapter; BadRequest where the adapter cannot
        be used.
        """
        base, adapter = self._parts(name)
        meant = self.meant(base)
        model_name, mapped = self._parts(meant)
        if adapter and mapped:
            raise BadRequest(f"adapter: {base[:100]!r} means {meant!r}, which has one already.", param="adapter")
        model = self._model(model_name, name)
        return self._adapted(model, adapter or mapped) if adapter or mapped else model

    def _parts(self, name: str) -> tuple[str, str]:
        """A model's name and its adapter's, which is empty for most. A model that is called so itself has none."""
        if ADAPTER_SIGN not in name or name in self.default.aliases or self.listing.find(name, look=False) is not None:
            return name, ""
        base, _, adapter = name.rpartition(ADAPTER_SIGN)
        return base, check_name(adapter, "adapter")

    def _model(self, meant: str, name: str) -> KnownModel:
        """Raises NotFound. `name`: as it was asked for."""
        if meant in self.default.aliases:
            return self.default
        foreign = _FOREIGN_NAMES.match(meant.rsplit("/", 1)[-1]) is not None
        known = self.listing.find(meant, look=not foreign)
        if known is None and meant in self._elsewhere.values():
            names = ", ".join(each for each, model in self._elsewhere.items() if model == meant)
            what = f"model={name[:100]!r}: {meant} is not on this machine; ask the proxy, by the name {names}, for"
            raise NotFound(f"{what} a chat completion, a message or a response.", param="model", code="model_elsewhere")
        if known is None and not foreign:
            raise NotFound(self._sentence(name), param="model", code="model_not_found")
        return known or self.default

    def find_chat(self, name: str) -> KnownModel:
        """As `find`, of models that can be asked to write. Raises BadRequest for others."""
        known = self.find(name)
        if known.task is not None:
            what = f"{known.name} is an audio model ({known.task}) and writes no answers"
            route = f"it is for /v1/audio/{PATHS[known.task]}."
            raise BadRequest(f"model={name[:100]!r}: {what}; {route}", param="model", code="wrong_kind")
        return known

    def find_audio(self, name: str, task: AudioTask) -> KnownModel:
        """The model that `name` means for this task. Raises BadRequest, NotFound, NotSupported."""
        settings = self._settings
        setting = settings.transcription_model if task == "transcription" else settings.speech_model
        meant = self.meant(name)
        if meant in MAIN_NAMES or _FOREIGN_AUDIO[task].fullmatch(meant.rsplit("/", 1)[-1]):
            if setting is None:
                what = f"This server has no model for {task}"
                raise NotSupported(f"{what}: set {SETTINGS[task]} to a repository or folder.")
            meant = full_name(setting) or setting
        known = self._model(meant, name)
        if known.task != task:
            kind = "a language model" if known.task is None else f"an audio model ({known.task})"
            what = f"{known.name} is {kind}; /v1/audio/{PATHS[task]} needs a model for {task}."
            raise BadRequest(f"model={name[:100]!r}: {what}", param="model", code="wrong_kind")
        return known

    def _adapted(self, model: KnownModel, name: str) -> KnownModel:
        """The model with the adapter of that name: itself, if that is what it is served with anyway."""
        adapter = self._adapters.find(name)
        if adapter is None:
            raise NotFound(self._no_adapter(name, model), param="adapter", code="adapter_not_found")
        if self._is_own(model, adapter):
            return model
        if adapter.problem:
            raise unusable(adapter.problem)
        if not adapter.fits(*_names_of(model)):
            trained = f"The adapter {name!r} was trained on {public_name(adapter.base)}, not on {model.name}."
            raise unusable(
                f'{trained} If that is the same model, write its name as "model" into the adapter\'s {CONFIG}.'
            )
        return model.with_adapter(adapter)

    def _is_own(self, model: KnownModel, adapter: StoredAdapter) -> bool:
        """Whether it is ADAPTER_PATH's, with which the main model is served anyway."""
        path = self._settings.adapter_path
        return model.default and path is not None and group_of(expanded(path)) == group_of(adapter.folder)

    def all(self) -> tuple[KnownModel, ...]:
        """All but the main model. Every model is followed by itself with each adapter that was trained on it."""
        adapters = [adapter for adapter in self._adapters.all() if not adapter.problem]
        found = []
        for model in (self.default, *self.listing.all()):
            fitting = [each for each in adapters if model.task is None and each.fits(*_names_of(model))]
            found += [] if model.default else [model]
            found += [model.with_adapter(each) for each in fitting if not self._is_own(model, each)]
        return tuple(found)

    def is_pinned(self, known: KnownModel) -> bool:
        """By its own file, else by PINNED_MODELS."""
        return bool(self._own_values(known).get("pinned", self._pinned & known.aliases))

    def _own_values(self, known: KnownModel) -> Mapping[str, Any]:
        """What the user's file for it says; nothing where that cannot be used: loading the model says why."""
        main = self._settings.model_path or EMBEDDED_NAME
        try:
            return read_overrides(FOLDER, main if known.default else known.source).values
        except NotSupported:
            return {}

    def is_preloaded(self, name: str) -> bool:
        for asked in self._settings.preloaded:
            with suppress(NotFound, BadRequest):
                if self.find(asked).name == name:
                    return True
        return False

    def settings_for(self, known: KnownModel) -> Settings:
        """The settings with this model as MODEL_PATH, and with what its own file says."""
        own = self._own_values(known)
        changes: dict[str, Any] = {setting: own[key] for key, setting in _OWN_SETTINGS.items() if key in own}
        if known.default:
            return self._settings.model_copy(update=changes) if changes else self._settings
        changes |= {"served_model_name": known.name, "adapter_path": None}
        if known.stored is not self.default.stored:
            changes |= {"model_path": known.source, "model_family": None}
        if known.adapter is not None:
            changes["vision"] = "off"  # mlx-lm's adapters are for text models
        return self._settings.model_copy(update=changes)

    def weights(self, known: KnownModel) -> Weights:
        """About what it takes, before it is loaded; the disk is not asked."""
        stored, sees = known.stored, self._settings.vision == "auto" and self._settings.kv_bits is None
        if known.adapter is not None:
            return Weights(known.adapter.size, known.group, stored.weight_bytes)
        if known.task is not None or (sees and "images" in stored.can):  # it shares its weights with no adapter
            return Weights(stored.weight_bytes)
        return Weights(0, known.group, stored.weight_bytes)

    def _no_adapter(self, name: str, model: KnownModel) -> str:
        names = [each.name for each in self._adapters.all() if not each.problem and each.fits(*_names_of(model))]
        return f"adapter={name!r}: there is no such adapter; for {model.name!r} there are {_list(names) or 'none'}."

    def _sentence(self, name: str) -> str:
        """That there is no model of that name, and which there are."""
        models = sorted(self.all(), key=lambda known: known.adapter is not None)
        names = [self.default.name, *(known.name for known in models)]
        meant = self.meant(name)
        mapped = f" (MODEL_MAP: {meant!r})" if meant != name else ""
        return f"model={name[:100]!r}{mapped}: this server serves {_list(names)}."


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _names_of(model: KnownModel) -> tuple[str, ...]:
    return model.source, model.stored.folder.name
