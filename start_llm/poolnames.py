"""Which model a request's name means: the main one, one on this disk, or none. The only place that decides that."""

from __future__ import annotations

import re
from pathlib import Path

from start_llm.core.audio import AudioTask
from start_llm.core.errors import BadRequest, NotFound, NotSupported
from start_llm.core.settings import Settings
from start_llm.models.audio import SETTINGS
from start_llm.models.names import Known, Names, key_of
from start_llm.models.recommended import full_name

# Names that clients are hard-wired to; where MODEL_MAP says nothing of them they mean the main model.
_FOREIGN_NAMES = re.compile(r"(claude|gpt|chatgpt|codex|o\d)([-.:].*)?$", re.IGNORECASE)
MAIN_NAMES = frozenset({"", "default"})
_FOREIGN_AUDIO: dict[AudioTask, re.Pattern[str]] = {
    "transcription": re.compile(r"whisper-\d|gpt-4o(-mini)?-transcribe([-.].*)?"),
    "speech": re.compile(r"tts-\d(-hd)?|gpt-4o(-mini)?-tts([-.].*)?"),
}
"""OpenAI's names, which mean what the settings name."""
PATHS: dict[AudioTask, str] = {"transcription": "transcriptions", "speech": "speech"}
_SHOWN = 12


class PoolNames:
    """Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = Names(settings)
        self._main = MAIN_NAMES
        self._first = "default"
        self._table = settings.models_by_name
        meant = {self._table.resolve(name) for name in settings.pinned} | set(settings.pinned)
        self._pinned = {full_name(name) or name for name in meant} | meant

    def began(self, name: str, source: str, folder: Path) -> None:
        """What the main model is called is known, and where it lies: only now, for it may just have been fetched."""
        self._names.leave_out(key_of(folder), name)
        self._first = name
        self._main = MAIN_NAMES | {name, source, f"openai/{source}", f"openai/{name}"}

    def meant(self, name: str) -> str:
        """MODEL_MAP's word on it. What a model itself is called always means that model."""
        own = self._names.find(name, look=False)
        if name == self._first or (own is not None and own.name == name):
            return name
        return self._table.resolve(name)

    def find(self, name: str) -> Known | None:
        """``None``: the main model. Raises NotFound where the name means no model."""
        meant = self.meant(name)
        if meant in self._main:
            return None
        foreign = _FOREIGN_NAMES.match(meant.rsplit("/", 1)[-1]) is not None
        known = self._names.find(meant, look=not foreign)
        if known is None and not foreign:
            raise NotFound(self._sentence(name), param="model", code="model_not_found")
        return known

    def find_chat(self, name: str) -> Known | None:
        """As `find`, of models that can be asked to write. Raises BadRequest for others."""
        known = self.find(name)
        if known is not None and known.stored.audio is not None:
            raise BadRequest(
                f"model={name[:100]!r}: {known.name} is an audio model ({known.stored.audio}) and writes no answers; "
                f"it is for /v1/audio/{PATHS[known.stored.audio]}.",
                param="model",
                code="wrong_kind",
            )
        return known

    def find_audio(self, name: str, task: AudioTask) -> Known:
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
        known = None if meant in self._main else self._names.find(meant)
        if known is None and (meant in self._main or _FOREIGN_NAMES.match(meant.rsplit("/", 1)[-1])):
            raise BadRequest(_not_audio(name, self._first, "a language model", task), param="model", code="wrong_kind")
        if known is None:
            raise NotFound(self._sentence(name), param="model", code="model_not_found")
        if known.stored.audio != task:
            kind = "a language model" if known.stored.audio is None else f"an audio model ({known.stored.audio})"
            raise BadRequest(_not_audio(name, known.name, kind, task), param="model", code="wrong_kind")
        return known

    def all(self) -> tuple[Known, ...]:
        return self._names.all()

    def is_pinned(self, *names: str) -> bool:
        """By PINNED_MODELS."""
        return bool(self._pinned & set(names))

    def is_preloaded(self, name: str) -> bool:
        return any(self._name_of(each) == name for each in self._settings.preloaded)

    def _name_of(self, asked: str) -> str | None:
        """Of a model beside the main one."""
        try:
            known = self.find(asked)
        except NotFound:
            return None
        return None if known is None else known.name

    def settings_for(self, known: Known) -> Settings:
        """The settings with this model as MODEL_PATH."""
        changes = {
            "model_path": known.source,
            "served_model_name": known.name,
            "model_family": None,
            "adapter_path": None,
        }
        return self._settings.model_copy(update=changes)

    def _sentence(self, name: str) -> str:
        """That there is no model of that name, and which there are."""
        names = [self._first, *(known.name for known in self._names.all())]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        meant = self.meant(name)
        mapped = f" (MODEL_MAP: {meant!r})" if meant != name else ""
        return f"model={name[:100]!r}{mapped}: this server serves {', '.join(map(repr, names[:_SHOWN]))}{more}."


def _not_audio(asked: str, name: str, kind: str, task: AudioTask) -> str:
    return f"model={asked[:100]!r}: {name} is {kind}; /v1/audio/{PATHS[task]} needs a model for {task}."
