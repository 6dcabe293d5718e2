"""The models that there are, and which of them are loaded. Implements `chat.handle.Models`.

`poolbook` keeps what is known of each, and who waits for it; `poolloader` is the thread that brings them in and out.
Everything here only looks, or leaves a wish.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from start_llm.core.audio import AudioTask
from start_llm.core.errors import BadRequest, Conflict, NotFound, StartLLMError, Unavailable
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.engine.loop import SHUTTING_DOWN
from start_llm.engine.thread import EngineThread
from start_llm.modelpool.active import ActiveModel
from start_llm.modelpool.builder import Built, ModelBuilder
from start_llm.modelpool.cards import ModelCards
from start_llm.modelpool.known import KnownModel
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.registry import ModelLease, ModelRegistry
from start_llm.modelpool.resolve import NameResolver
from start_llm.models.room import Weights
from start_llm.prompt.clients import Clients

UNLOAD_SECONDS = 60.0
"""What a client that has a model unloaded waits for at most."""


class Pool:
    """
    Args:
        say: tells people what is loaded and unloaded.

    Attributes:
        listed: what is told of each model.
    """

    def __init__(self, settings: Settings, clients: Clients, say: Callable[[str], None]) -> None:
        self._settings, self._clients, self._say = settings, clients, say
        self._names = NameResolver(settings)
        self._book = ModelRegistry(settings, self._names)
        self.listed = ModelCards(settings, self._names, self._book)
        self._engine: EngineThread
        self._builder: ModelBuilder
        self._loader: Loader

    def connect(self, engine: EngineThread, builder: ModelBuilder) -> None:
        """To be called once, before anything else."""
        self._engine, self._builder = engine, builder
        self._loader = Loader(self._settings, self._book, self._names, engine, builder, self._clients, self._say)

    # --- start and stop: the app's thread ---------------------------------------------

    def begin(self, built: Built) -> ModelCard:
        """The main model is loaded. Raises NotSupported if it cannot be served."""
        main = self._book.main
        serving = self._loader.serve(main, built)
        self._names.began(serving.served.name, serving.served.source, built.loaded.folder)
        with self._book.lock:
            main.pinned = self._names.is_main_pinned()
            self._book.ready(main, serving)
        self._loader.start()
        for name in self._settings.preloaded:
            try:
                self.open_any(name).close()
            except StartLLMError as error:
                self._say(f"preload   {error.message}")
        return serving.card

    def stop(self) -> None:
        """After the model thread's end. May be called twice."""
        self._loader.stop()
        for entry in self._book.entries():
            with self._book.lock:
                serving, entry.serving = entry.serving, None
                self._book.give_up(entry, Unavailable(SHUTTING_DOWN))
            if serving is not None:
                serving.close()

    @property
    def main_serving(self) -> ActiveModel | None:
        """The main model, while it is loaded."""
        return self._book.main.serving

    # --- served.Models: any thread ----------------------------------------------------

    def open(self, name: str) -> ModelLease:
        self._check_started()
        return self._book.lease(self._find(name, self._names.find_chat))

    def open_audio(self, name: str, task: AudioTask) -> ModelLease:
        """As `open`. Raises BadRequest for a model that does something else."""
        self._check_started()
        return self._book.lease(self._names.find_audio(name, task))

    def audio_name(self, asked: str, task: AudioTask) -> str:
        """The name of the model that `asked` means. Raises BadRequest, NotFound, NotSupported."""
        return self._names.find_audio(asked, task).name

    def open_any(self, name: str) -> ModelLease:
        """As `open`, of models of every kind."""
        self._check_started()
        return self._book.lease(self._find(name))

    def _check_started(self) -> None:
        """Raises Unavailable until the main model has been loaded."""
        if self.main is None:
            raise Unavailable(self._engine.status().detail or "The model is still loading.")

    def _find(self, name: str, find: Callable[[str], KnownModel | None] | None = None) -> KnownModel | None:
        """``None``: the main model. A model that is loaded may have been removed from the disk. Raises NotFound."""
        try:
            return (find or self._names.find)(name)
        except NotFound:
            loaded = self._book.loaded_as(name)
            if loaded is None:
                raise
            return loaded

    @property
    def main(self) -> ModelCard | None:
        return self._book.main.card

    def cards(self) -> tuple[ModelCard, ...]:
        return () if self.main is None else self.listed.all()

    def card(self, name: str) -> ModelCard:
        return self.listed.of(self._book.entry(self._find(name)))

    def served_name(self, asked: str) -> str:
        main = self.main
        if main is None:
            return asked
        try:
            known = self._find(asked)
        except (NotFound, BadRequest):
            return asked
        return main.id if known is None else known.name

    def token_text(self, token: int, name: str) -> str:
        try:
            known = self._find(name)
        except (NotFound, BadRequest):
            return ""
        serving = self._book.entry(known).serving
        return "" if serving is None else serving.served.token_text(token)

    def unload(self, name: str) -> ModelCard:
        known = self._find(name)
        with self._book.lock:
            entry = self._book.entry(known)
            if entry.users:
                raise Conflict(f"{entry.name} has {entry.users} requests at work or waiting; end them first.")
            if entry.state == "ready":
                self._book.send_away(entry)
        until = time.monotonic() + UNLOAD_SECONDS
        while entry.state == "unloading" and time.monotonic() < until and not self._loader.stopping:
            time.sleep(0.02)
        return self.listed.of(entry)

    def pin(self, name: str, pinned: bool) -> ModelCard:
        known = self._find(name)
        with self._book.lock:
            entry = self._book.entry(known)
            entry.pinned = pinned
            self._book.look_again()
        return self.listed.of(entry)

    def figures(self) -> Mapping[str, float]:
        """Counters of all prompt pipelines, and of the pool itself, by the names that `/metrics` shows."""
        with self._book.lock:
            found = Counter(self._book.gone)
            entries = self._book.entries()
            loaded = [entry.serving for entry in entries if entry.serving is not None]
            audio = sum(entry.audio is not None for entry in entries)
        for serving in loaded:
            found.update(serving.served.pipeline.counters())
        prompts = {f"prompt_{name}": value for name, value in found.items()}
        return prompts | {"models_loaded": len(loaded) + audio, "models_weight_bytes": self._builder.weight_bytes}

    # --- the model thread ---------------------------------------------------------------

    def reclaim(self, need: int) -> bool:
        """Sends idle models away for `need` more bytes of KV. False: there are not so many."""
        return self._book.reclaim(need)

    def staying(self, model: str) -> list[Weights]:
        """Of pinned models other than this one."""
        return self._book.pinned_weights(model)
