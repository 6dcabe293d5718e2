"""The models that there are, and which of them are loaded. Implements `served.Models`.

`poolbook` keeps what is known of each, and who waits for it; `poolloader` is the thread that brings them in and out.
Everything here only looks, or leaves a wish.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from start_llm.building import Built, ModelBuilder
from start_llm.core.audio import AudioTask
from start_llm.core.errors import BadRequest, Conflict, NotFound, StartLLMError, Unavailable
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.engine.loop import SHUTTING_DOWN
from start_llm.engine.thread import EngineThread
from start_llm.models.names import Known
from start_llm.models.pool import Weights
from start_llm.poolbook import Book, Entry, Lease
from start_llm.poolloader import Loader
from start_llm.poolnames import PoolNames
from start_llm.prompt.clients import Clients
from start_llm.serving import Serving

UNLOAD_SECONDS = 60.0
"""What a client that has a model unloaded waits for at most."""


class Pool:
    """
    Args:
        say: tells people what is loaded and unloaded.
    """

    def __init__(self, settings: Settings, clients: Clients, say: Callable[[str], None]) -> None:
        self._settings, self._clients, self._say = settings, clients, say
        self._names = PoolNames(settings)
        self._book = Book(settings, self._names)
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
            main.pinned = self._names.is_pinned(serving.served.name, serving.served.source)
            self._book.ready(main, serving)
        self._loader.start()
        for name in self._settings.preloaded:
            try:
                self.open(name).close()
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
    def main_serving(self) -> Serving | None:
        """The main model, while it is loaded."""
        return self._book.main.serving

    # --- served.Models: any thread ----------------------------------------------------

    def open(self, name: str) -> Lease:
        if self.main is None:
            raise Unavailable(self._engine.status().detail or "The model is still loading.")
        return self._book.lease(self._find(name, self._names.find_chat))

    def open_audio(self, name: str, task: AudioTask) -> Lease:
        """As `open`. Raises BadRequest for a model that does something else."""
        if self.main is None:
            raise Unavailable(self._engine.status().detail or "The model is still loading.")
        return self._book.lease(self._names.find_audio(name, task))

    def audio_name(self, asked: str, task: AudioTask) -> str:
        """The name of the model that `asked` means. Raises BadRequest, NotFound, NotSupported."""
        return self._names.find_audio(asked, task).name

    def open_any(self, name: str) -> Lease:
        """As `open`, of models of every kind."""
        if self.main is None:
            raise Unavailable(self._engine.status().detail or "The model is still loading.")
        return self._book.lease(self._find(name))

    def _find(self, name: str, find: Callable[[str], Known | None] | None = None) -> Known | None:
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
        if self.main is None:
            return ()
        listed = self._names.all()
        self._book.forget(listed)
        entries = self._book.entries()
        keys = {entry.key for entry in entries}
        cards = [self._card(entry) for entry in entries]
        return (*cards, *(self._stored_card(known) for known in listed if known.key not in keys))

    def other_cards(self) -> list[ModelCard]:
        """Of the models that answer beside the main one."""
        return [card for card in self.cards()[1:] if "task" not in card.details]

    def audio_cards(self) -> list[ModelCard]:
        """Of the audio models; `details` has the task of each."""
        return [card for card in self.cards() if "task" in card.details]

    def card(self, name: str) -> ModelCard:
        known = self._find(name)
        return self._card(self._book.entry(known))

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
        return self._card(entry)

    def pin(self, name: str, pinned: bool) -> ModelCard:
        known = self._find(name)
        with self._book.lock:
            entry = self._book.entry(known)
            entry.pinned = pinned
            self._book.look_again()
        return self._card(entry)

    def figures(self) -> Mapping[str, float]:
        """Counters of all prompt pipelines, and of the pool itself, by the names that `/metrics` shows."""
        with self._book.lock:
            found = Counter(self._book.gone)
            loaded = [entry.serving for entry in self._book.entries() if entry.serving is not None]
        for serving in loaded:
            found.update(serving.served.pipeline.counters())
        prompts = {f"prompt_{name}": value for name, value in found.items()}
        return prompts | {"models_loaded": len(loaded), "models_weight_bytes": self._builder.weight_bytes}

    # --- the model thread ---------------------------------------------------------------

    def reclaim(self, need: int) -> bool:
        """Sends idle models away for `need` more bytes of KV. False: there are not so many."""
        return self._book.reclaim(need)

    def staying(self, model: str) -> list[Weights]:
        """Of pinned models other than this one."""
        return self._book.pinned_weights(model)

    def _card(self, entry: Entry) -> ModelCard:
        """As it is now. Nothing is locked while the disk is looked at: it may hang."""
        with self._book.lock:
            now = copy(entry)
        card = now.card if now.card is not None else self._stored_card(now.known) if now.known else None
        assert card is not None, "the main model has one from its start on"
        failed = now.failure is not None and now.state == "stored"
        return replace(
            card,
            state="failed" if failed else now.state,
            pinned=now.pinned,
            kv_bytes=now.serving.built.kv_bytes() if now.serving is not None else 0,
            problem=now.failure.message if failed and now.failure is not None else "",
        )

    def _stored_card(self, known: Known) -> ModelCard:
        stored, most, adapter = known.stored, self._settings.max_kv_size, known.adapter
        context = min(most, stored.context or most)
        details: dict[str, Any] = {"source": known.source}
        if stored.audio is not None:
            context = 0
            details |= {"kind": "audio", "task": stored.audio}
        if adapter is not None:
            details |= {"base": known.base, "adapter": adapter.name}
        sees = "images" in stored.can and adapter is None
        return ModelCard(
            known.name,
            int(stored.folder.stat().st_mtime) if stored.folder.exists() else 0,
            context,
            tools="tools" in stored.can,
            reasoning="reasoning" in stored.can,
            vision=sees and self._settings.vision == "auto",
            images="reject" if stored.audio else "shown" if sees else self._settings.images_on_text_model,
            state="stored",
            pinned=self._names.is_pinned(*known.aliases),
            weight_bytes=stored.size if adapter is None else adapter.size,
            context_scale=self._settings.context_scale_for(context),
            details=details,
        )
