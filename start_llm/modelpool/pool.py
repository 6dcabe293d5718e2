"""The models that there are, and which of them are loaded. Implements `chat.handle.Models`.

What stands here only looks, or leases a model. `registry` keeps what is known of each, `loader` is the thread that
brings them in and out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from start_llm.chat.handle import loaded
from start_llm.core.errors import BadRequest, Conflict, NotFound, StartLLMError, Unavailable
from start_llm.core.media import AudioTask
from start_llm.core.service import ModelCard
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.loop import SHUTTING_DOWN
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.thread import EngineThread
from start_llm.host.pressure import Pressure
from start_llm.modelpool.cards import all_cards, card_now
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.registry import ModelLease, ModelRegistry
from start_llm.modelpool.resolve import KnownModel
from start_llm.models.catalog import StoredModel

UNLOAD_SECONDS = 60.0
"""What a client that has a model unloaded waits for at most."""
UNUSED_SECONDS = 60.0
"""A model that was not used for so long goes while memory is critically short."""


class Pool:
    def __init__(self, registry: ModelRegistry, engine: EngineThread, builder: ModelBuilder, loader: Loader) -> None:
        self._registry, self._names = registry, registry.names
        self._engine = engine
        self._builder = builder
        self._loader = loader

    # --- start and stop: the app's thread ---------------------------------------------

    def start_loading(self) -> ModelCard:
        """Returns when the main model is loaded. Raises StartLLMError: why it cannot be."""
        with closing(self._registry.lease(self._names.default)) as lease:
            self._loader.start()
            lease.wait(float("inf"))
            lease.check()
        for name in self._registry.settings.preloaded:
            try:
                self.open_any(name).close()
            except StartLLMError as error:
                self._loader.tell(f"preload   {error.message}")
        card = self.main
        assert card is not None, "it is loaded"
        return card

    def stop(self, patience: float = 10.0) -> None:
        """After the model thread's end. Waits so many seconds for the loader's. May be called twice."""
        self._loader.stop(patience)
        for entry in self._registry.entries():
            with self._registry.lock:
                handle = entry.release()
                entry.give_up(Unavailable(SHUTTING_DOWN))
            if handle is not None and entry.known.task is None:
                handle.recorder.close()
                handle.pipeline.close()

    def press(self, level: Pressure) -> None:
        """The machine is short of memory: where that is critical, models go that nobody has used for a while."""
        if level is Pressure.CRITICAL:
            self._registry.evict_idle(UNUSED_SECONDS)

    @property
    def main_runtime(self) -> TextRuntime | None:
        """The main model, while it is loaded."""
        return self._registry.default.runtime

    # --- chat.handle.Models: any thread -------------------------------------------------

    def open(self, name: str) -> ModelLease:
        return _lease(self._registry, lambda: self._find(name, self._names.find_chat))

    def open_any(self, name: str) -> ModelLease:
        """As `open`, of models of every kind."""
        return _lease(self._registry, lambda: self._find(name))

    def open_audio(self, name: str, task: AudioTask) -> ModelLease:
        """As `open`. Raises BadRequest for a model that does something else."""
        _check_started(self.main, self._engine)
        return _lease(self._registry, lambda: self._names.find_audio(name, task))

    def open_encoder(self, name: str, folder: Path) -> ModelLease:
        """A hold on the encoder in that folder. Its memory is set aside: it stays loaded."""
        stored = StoredModel(name, folder, 0, None, ("embedding",))
        return self._registry.lease(KnownModel(f"embedding {folder}", name, str(folder), frozenset(), stored))

    def audio_name(self, asked: str, task: AudioTask) -> str:
        """The name of the model that `asked` means. Raises BadRequest, NotFound, NotSupported."""
        return self._names.find_audio(asked, task).name

    def _find(self, name: str, find: Callable[[str], KnownModel] | None = None) -> KnownModel:
        """A model that is loaded may have been removed from the disk. Raises NotFound; Unavailable before the start."""
        _check_started(self.main, self._engine)
        try:
            return (find or self._names.find)(name)
        except NotFound:
            loaded = self._registry.loaded_as(name)
            if loaded is None:
                raise
            return loaded

    @property
    def main(self) -> ModelCard | None:
        return self._registry.default.card

    def cards(self) -> tuple[ModelCard, ...]:
        return () if self.main is None else tuple(map(self._loader.progress.shown, all_cards(self._registry)))

    def card(self, name: str) -> ModelCard:
        return card_now(self._registry, self._registry.entry(self._find(name)))

    def served_name(self, asked: str) -> str:
        with suppress(NotFound, BadRequest, Unavailable):
            return self._find(asked).name
        return asked

    def token_text(self, token: int, model: str = "") -> str:
        with suppress(NotFound, BadRequest, Unavailable):
            entry = self._registry.entry(self._find(model))
            handle = entry.handle if entry.known.task is None else None
            return "" if handle is None else str(handle.token_text(token))
        return ""

    def load(self, name: str) -> ModelCard:
        with loaded(self.open_any(name), name):
            return self.card(name)

    def unload(self, name: str) -> ModelCard:
        known = self._find(name)
        with self._registry.lock:
            entry = self._registry.entry(known)
            if entry.users:
                raise Conflict(f"{entry.name} is in use (requests at work or waiting: {entry.users}); end them first.")
            if entry.state == "ready":
                self._registry.order(entry, "evicted")
        until = time.monotonic() + UNLOAD_SECONDS
        while entry.state == "unloading" and time.monotonic() < until and not self._loader.stopping:
            time.sleep(0.02)
        return card_now(self._registry, entry)

    def pin(self, name: str, pinned: bool) -> ModelCard:
        known = self._find(name)
        with self._registry.lock:
            entry = self._registry.entry(known)
            entry.pinned = pinned
            self._registry.room.look_again()
        return card_now(self._registry, entry)

    def figures(self) -> Mapping[str, float]:
        """Counters of all prompt pipelines, and of the pool itself, by the names that `/metrics` shows."""
        with self._registry.lock:
            found = Counter(self._registry.counted)
            entries = [entry for entry in self._registry.entries() if not entry.known.is_reserved]
            loaded = [(entry.known.task, entry.handle) for entry in entries if entry.handle is not None]
        for task, handle in loaded:
            if task is None:
                found.update(handle.pipeline.counters())
        prompts = {f"prompt_{name}": value for name, value in found.items()}
        shared = self._builder.shared
        return prompts | {
            "models_loaded": len(loaded),
            "models_weight_bytes": shared.weight_bytes,
            "models_memory_bytes": shared.usable,
            "kv_running_bytes": shared.running,
        }


def _lease(registry: ModelRegistry, find: Callable[[], KnownModel]) -> ModelLease:
    """What is about to be loaded is looked up again: its name may mean another folder since the last look."""
    if registry.entry(find()).state == "stored":
        registry.names.listing.look_again()
    return registry.lease(find())


def _check_started(main: ModelCard | None, engine: EngineThread) -> None:
    """Raises Unavailable until the main model has been loaded."""
    if main is None:
        raise Unavailable(engine.status().detail or "The model is still loading.")
