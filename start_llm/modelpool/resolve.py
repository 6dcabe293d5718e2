"""Which model a request's name means: the default one, one on this disk, or none. The only place that decides that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from start_llm.core.errors import BadRequest, NotFound, NotSupported
from start_llm.core.media import AudioTask
from start_llm.core.modelmap import ADAPTER_SIGN, MAIN_NAME
from start_llm.core.settings import Settings
from start_llm.modelpool.known import KnownModel, ModelListing, aliases_of
from start_llm.models.adapter import CONFIG, AdapterFolder, StoredAdapter, check_name, public_name, unusable
from start_llm.models.catalog import StoredModel, describe, folder_of
from start_llm.models.checkpoint import SETTINGS
from start_llm.models.recommended import full_name
from start_llm.models.room import Weights, group_of

# Names that clients are hard-wired to; where MODEL_MAP says nothing of them they mean the default model.
_FOREIGN_NAMES = re.compile(r"(claude|gpt|chatgpt|codex|o\d)([-.:].*)?$", re.IGNORECASE)
MAIN_NAMES = frozenset({"", MAIN_NAME})
_FOREIGN_AUDIO: dict[AudioTask, re.Pattern[str]] = {
    "transcription": re.compile(r"whisper-\d|gpt-4o(-mini)?-transcribe([-.].*)?"),
    "speech": re.compile(r"tts-\d(-hd)?|gpt-4o(-mini)?-tts([-.].*)?"),
}
"""OpenAI's names, which mean what the settings name."""
PATHS: dict[AudioTask, str] = {"transcription": "transcriptions", "speech": "speech"}
_SHOWN = 12


class NameResolver:
    """Any thread.

    Attributes:
        default: the model that the server was started with. What it is called, and where it lies, is known once it is
            loaded.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listing = ModelListing(settings)
        unknown = StoredModel(MAIN_NAME, Path(), 0, None, ())
        self.default = KnownModel("", MAIN_NAME, MAIN_NAME, MAIN_NAMES, unknown, default=True)
        self._table = settings.models_by_name
        meant = {
            means for name in settings.pinned for means in (name, self._table.resolve(name), self._base_meant(name))
        }
        self._pinned = {full_name(name) or name for name in meant} | meant
        self._adapters = AdapterFolder(settings.adapters_folder)

    def default_loaded(self, name: str, source: str, folder: Path) -> None:
        """Says what the default model is called, and where it lies: only now, for it may just have been fetched.

        Again whenever it has been loaded anew: its repository may have another commit by then.
        """
        key, names = group_of(folder), aliases_of(name, source)
        self._listing.leave_out(key, names)
        self.default = KnownModel(key, name, source, MAIN_NAMES | names | {key}, describe(source, folder), default=True)

    def folder_now(self, known: KnownModel) -> Path:
        """Where the model lies now. Raises NotFound if it is not on this disk any more: nothing is fetched."""
        source = self._settings.model_path
        if not known.default or source is None:
            return known.stored.folder
        found = folder_of(source)
        if found is None:
            raise NotFound(f"{known.name} cannot be loaded: {source} is not on this disk any more; fetch it again.")
        return found

    def meant(self, name: str) -> str:
        """MODEL_MAP's word on it. What a model itself is called always means that model."""
        if name in (self.default.name, self.default.source):
            return name
        listed = self._listing.find(name, look=False)
        if listed is not None and name in (listed.name, listed.source):
            return name
        return self._table.resolve(name)

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
        if ADAPTER_SIGN not in name or name in self.default.aliases or self._listing.find(name, look=False) is not None:
            return name, ""
        base, _, adapter = name.rpartition(ADAPTER_SIGN)
        return base, check_name(adapter, "adapter")

    def _model(self, meant: str, name: str) -> KnownModel:
        """Raises NotFound. `name`: as it was asked for."""
        if meant in self.default.aliases:
            return self.default
        foreign = _FOREIGN_NAMES.match(meant.rsplit("/", 1)[-1]) is not None
        known = self._listing.find(meant, look=not foreign)
        if known is None and not foreign:
            raise NotFound(self._sentence(name), param="model", code="model_not_found")
        return known or self.default

    def find_chat(self, name: str) -> KnownModel:
        """As `find`, of models that can be asked to write. Raises BadRequest for others."""
        known = self.find(name)
        if known.stored.audio is not None:
            raise BadRequest(
                f"model={name[:100]!r}: {known.name} is an audio model ({known.stored.audio}) and writes no answers; "
                f"it is for /v1/audio/{PATHS[known.stored.audio]}.",
                param="model",
                code="wrong_kind",
            )
        return known

    def find_audio(self, name: str, task: AudioTask) -> KnownModel:
        """The model that `name` means for this task. Raises BadRequest, NotFound, NotSupported."""
        settings = self._settings
        setting = settings.transcription_model if task == "transcription" else settings.speech_model
        meant = self.meant(name)
        if meant in MAIN_NAMES or _FOREIGN_AUDIO[task].fullmatch(meant.rsplit("/", 1)[-1]):
            if setting is None:
                raise NotSupported(
                    f"This server has no model for {task}: set {SETTINGS[task]} to a repository or folder."
                )
            meant = full_name(setting) or setting
        known = self._model(meant, name)
        if known.stored.audio != task:
            kind = "a language model" if known.stored.audio is None else f"an audio model ({known.stored.audio})"
            raise BadRequest(_not_audio(name, known.name, kind, task), param="model", code="wrong_kind")
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
        """Whether it is ADAPTER_PATH's, with which the default model is served anyway."""
        path = self._settings.adapter_path
        return model.default and path is not None and group_of(Path(path).expanduser()) == group_of(adapter.folder)

    def all(self) -> tuple[KnownModel, ...]:
        """Those beside the default one. Every model is followed by itself with each adapter that was trained on it."""
        adapters = [adapter for adapter in self._adapters.all() if not adapter.problem]
        found = []
        for model in (self.default, *self._listing.all()):
            if not model.default:
                found.append(model)
            for adapter in adapters if model.stored.audio is None else ():
                if not self._is_own(model, adapter) and adapter.fits(*_names_of(model)):
                    found.append(model.with_adapter(adapter))
        return tuple(found)

    def is_pinned(self, *names: str) -> bool:
        """By PINNED_MODELS."""
        return bool(self._pinned & set(names))

    def is_preloaded(self, name: str) -> bool:
        for asked in self._settings.preloaded:
            with suppress(NotFound, BadRequest):
                if self.find(asked).name == name:
                    return True
        return False

    def settings_for(self, known: KnownModel) -> Settings:
        """The settings with this model as MODEL_PATH."""
        if known.default:
            return self._settings
        changes: dict[str, Any] = {"served_model_name": known.name, "adapter_path": None}
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


def _not_audio(asked: str, name: str, kind: str, task: AudioTask) -> str:
    return f"model={asked[:100]!r}: {name} is {kind}; /v1/audio/{PATHS[task]} needs a model for {task}."


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _names_of(model: KnownModel) -> tuple[str, ...]:
    return model.source, model.stored.folder.name
