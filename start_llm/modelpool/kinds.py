"""How models of each kind are brought in and taken out: what is read first, and which steps the model thread does.

The loader's thread calls this. It decides which model comes and goes, and knows no kind; a kind knows no other model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from start_llm.audio import speech, transcription
from start_llm.audio.samples import LIBRARY
from start_llm.chat.handle import ModelHandle
from start_llm.core.errors import NotFound, NotSupported, StartLLMError, Unavailable
from start_llm.core.extras import check_installed
from start_llm.core.service import ModelCard
from start_llm.embeddings import compute
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.thread import EngineThread
from start_llm.kvcache.events import KVEvents
from start_llm.modelpool.cards import card_of
from start_llm.modelpool.handles import make_handle
from start_llm.modelpool.registry import ModelRegistry, PoolEntry
from start_llm.modelpool.resolve import SideTask
from start_llm.models.checkpoint import CheckpointError, check_source
from start_llm.models.loader import Found
from start_llm.models.room import Weights
from start_llm.prompt.clients import Clients

log = logging.getLogger(__name__)


class LoadProgress:
    """Notices that the loader's thread hangs; for the model thread there is a watchdog. Any thread."""

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        """`clock`: seconds; it stands while this process is stopped."""
        self.limit = limit  # seconds without a move after which it is taken to hang; 0: it is waited for
        self._clock = clock
        self._name = ""
        self._step: tuple[str, float] | None = None  # what is being done now, and the part of it that is done
        self._moved: float | None = None  # when something was read last; None: nothing is watched

    def begin(self, name: str) -> None:
        self._name = name
        self.moved()

    def moved(self) -> None:
        self._moved = self._clock()

    def end(self) -> None:
        self._moved = None

    def told(self, step: str, part: float) -> None:
        """Is a `Progress`."""
        self._step = (step, part) if 0.0 <= part < 1.0 else None
        if self._moved is not None:
            self.moved()

    def shown(self, card: ModelCard) -> ModelCard:
        """With ``loading`` among its details, if it is this model and something is being done for it."""
        now = self._step
        if now is None or card.state != "loading" or card.id != self._name:
            return card
        return replace(card, details=card.details | {"loading": {"step": now[0], "part": round(now[1], 3)}})

    def stuck(self) -> StartLLMError | None:
        moved = self._moved
        if not self.limit or moved is None or self._clock() - moved < self.limit:
            return None
        what = f"{self._name} is being loaded or unloaded, and nothing of it has moved for {self.limit:g} s"
        setting, until = "GENERATION_WATCHDOG_SECONDS", "until that ends no other model can be loaded."
        return Unavailable(f"{what} ({setting}); {until}", retry_after=self.limit)


@dataclass(frozen=True)
class _Kind:
    registry: ModelRegistry
    engine: EngineThread
    builder: ModelBuilder


@dataclass(frozen=True)
class LanguageModels(_Kind):
    """Text and vision models. `SideModels` has the same three methods."""

    clients: Clients
    events: KVEvents | None = None  # tells routers what is held of the main model's KV

    def read(self, entry: PoolEntry) -> Found | None:
        """Reads what can be read before others go for it. Raises NotFound and the like if it cannot be loaded anyway.

        ``None``: the model that the server is started with. It may still have to be fetched.
        """
        if entry.is_starting:
            return None
        if not self.builder.ranks.alone:
            raise NotSupported(f"{entry.name} is not served: HOSTS compute one model together, that of MODEL_PATH.")
        known = entry.known
        folder = self.registry.names.folder_now(known)
        try:
            check_source(str(folder), command="", trust_code=entry.settings.trust_remote_code)
        except CheckpointError as error:
            kind = NotSupported if folder.is_dir() else NotFound
            raise kind(f"{entry.name} cannot be loaded: {str(error).partition(': ')[2] or error}") from error
        return self.builder.read(entry.settings, folder, known.adapter)

    def load(self, entry: PoolEntry, found: Found | None, progress: LoadProgress) -> None:
        """Loads what `read` has found, and gives it to those who wait. Leaves nothing behind if it fails."""
        events = self.events if entry.known.default else None
        if found is None:
            steps = self.builder.first_steps(entry.settings, entry.key, events)
        else:
            self.builder.read_ahead(found.folder, entry.name)
            pinned = [each.weights for each in self.registry.residents() if each.pinned and each.key != entry.key]
            steps = self.builder.steps(entry.settings, found, entry.key, entry.weights, events, pinned)
        progress.end()
        runtime = self.engine.load(entry.key, steps)
        handle = None
        try:
            if entry.is_starting:
                self._make_vocabulary(runtime)
            anchor = partial(self.engine.prefill_idle, model=entry.key)
            publish = None if events is None else partial(events.announce, peek=runtime.store.peek)
            handle = make_handle(entry.settings, self.clients, runtime, entry.key, anchor, publish)
            card = card_of(entry.settings, handle, runtime.loaded, entry.known.base)
            if entry.known.default:
                self.registry.names.default_loaded(handle.name, runtime.loaded.source, runtime.loaded.folder)
            self.registry.ready(entry, handle, runtime.loaded.weights, runtime, card)
        except BaseException:
            self._take_out(entry, handle)
            raise

    def _make_vocabulary(self, runtime: TextRuntime) -> None:
        """For grammars: now, while nobody waits for it."""
        try:
            runtime.grammars.make_vocabulary()
        except NotSupported as error:
            log.warning("%s", error.message)

    def unload(self, entry: PoolEntry) -> weakref.ref[Any] | None:
        """Frees it; what fails is logged. Returns what is to be out of memory soon; ``None``: it is out already."""
        with self.registry.lock:
            model = None if entry.runtime is None else weakref.ref(entry.runtime.loaded.model)
            handle = entry.release()
        self._take_out(entry, handle)
        return model

    def _take_out(self, entry: PoolEntry, handle: ModelHandle | None) -> None:
        """`handle`: ``None`` if it came to none."""
        steps: list[Callable[[], object]] = [lambda: self.engine.unload(entry.key)]
        if handle is not None:
            counters = handle.pipeline.counters
            steps = [handle.recorder.close, *steps, handle.pipeline.close, lambda: self._count(counters)]
        try_all(f"unloading {entry.name}", *steps)

    def _count(self, counters: Callable[[], Any]) -> None:
        with self.registry.lock:
            self.registry.counted.update(counters())


_LIBRARIES: dict[SideTask, Callable[[Path, str], Generator[float, None, Any]]] = {
    "transcription": transcription.load_steps,
    "speech": speech.load_steps,
    "embedding": compute.load_steps,
}


class SideModels(_Kind):
    """Models that are no language models: they transcribe, speak, or make vectors. See `LanguageModels`."""

    def read(self, entry: PoolEntry) -> Generator[float, None, Any]:
        """The steps of its loading. Imports its library, which takes seconds."""
        task = entry.known.task
        assert task is not None
        if task != "embedding":  # whose service has looked itself
            check_installed(LIBRARY)
        return _LIBRARIES[task](entry.known.folder, entry.name)

    def load(self, entry: PoolEntry, inputs: Generator[float, None, Any], progress: LoadProgress) -> None:
        progress.end()
        model = self.engine.guest(self.builder.side_steps(entry.key, entry.weights, inputs))
        try:
            self.registry.ready(entry, model, Weights(model.nbytes))
        except BaseException:
            del model
            self.unload(entry)
            raise

    def unload(self, entry: PoolEntry) -> None:
        with self.registry.lock:
            entry.release()  # the model thread alone holds its arrays now
        try_all(f"unloading {entry.name}", lambda: self.engine.guest(self.builder.side_unloading(entry.key)))


def try_all(what: str, *steps: Callable[[], object]) -> None:
    """What fails is logged, and what comes after it is done all the same."""
    for step in steps:
        try:
            step()
        except Exception:  # the loader's edge: a fault while one model goes is no other model's matter
            log.warning("%s: a step failed", what, exc_info=True)
