"""The loader's thread: brings models in and out, one at a time.

It decides (`models.room`) who has to go for whom, and has `kinds` do the rest. What goes wrong with one model is told
to those who wait for it, and is no other model's matter. Knows no kind of model.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from queue import Empty
from typing import Any

from start_llm.core.errors import NOT_LOADABLE, BadRequest, Internal, OutOfMemory, StartLLMError, Unavailable
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.thread import EngineThread
from start_llm.kvcache.events import KVEvents
from start_llm.modelpool.kinds import LanguageModels, LoadProgress, SideModels, try_all
from start_llm.modelpool.registry import ModelRegistry, PoolEntry
from start_llm.models.background import Say
from start_llm.models.room import PoolLimits, room_for, there_will_be_room
from start_llm.prompt.clients import Clients

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LINGER_SECONDS = 2.0  # how long a model that is unloaded is waited for to be out of memory
COLLECT_SECONDS = 0.1  # between two looks at whether it is
_DEAD = frozenset({"wedged", "failed", "stopped"})


class Loader:
    """Does what the registry's load queue says. Its own thread, but for the public methods."""

    def __init__(
        self,
        registry: ModelRegistry,
        engine: EngineThread,
        builder: ModelBuilder,
        clients: Clients,
        say: Say,
        events: KVEvents | None = None,
    ) -> None:
        self._settings, self._registry = registry.settings, registry
        self._engine = engine
        self._builder = builder
        self._say = say
        self._language = LanguageModels(registry, engine, builder, clients, events)
        self._side = SideModels(registry, engine, builder)
        self.stopping = False
        self.progress = LoadProgress(self._settings.generation_watchdog_seconds, engine.watched)
        registry.stuck = self._stuck
        builder.told = self.progress.told
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Waits so many seconds for the thread's end. May be called twice."""
        self.stopping = True
        self._registry.load_queue.put(None)
        if self._thread.is_alive():
            self._thread.join(patience)

    def _stuck(self) -> StartLLMError | None:
        status = self._engine.status()
        if status.state in _DEAD:
            return Unavailable(status.detail or f"The model thread is {status.state}.")
        return self.progress.stuck()

    # --- its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        while True:
            entry = None
            try:
                entry = self._registry.load_queue.get(timeout=LOOK_SECONDS)
            except Empty:
                look_again = self._registry.room.look_again
                try_all("looking for models that nobody uses", self._registry.evict_idle, look_again)
                continue
            finally:
                try_all("ending waits", self._registry.room.end_waits)
            if entry is None or self.stopping:
                return
            if not entry.is_starting:  # what may have to be fetched has all the time that it needs
                self.progress.begin(entry.name)
            try:
                if entry.state == "loading":
                    self._load(entry)
                elif entry.state == "unloading":
                    self._unload(entry)
            except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next entry; logged there
                self._failed(entry, error)
            self.progress.end()

    def _load(self, entry: PoolEntry) -> None:
        names = self._registry.names
        preloaded = names.is_preloaded(entry.name)  # may look at the disk, which may hang
        entry.settings = names.settings_for(entry.known)  # its own file may have changed
        with self._registry.lock:
            if not entry.waiting and entry.users == 0 and not preloaded:
                self._registry.room.remove(entry)
                entry.move("unwanted")  # whoever wanted it has gone
                return
        began, starting, kind = time.monotonic(), entry.is_starting, self._kind_of(entry)
        loaded = False
        try:
            # If the last model with these weights goes to make room, they stay for this one.
            shared = self._builder.bases.get(entry.weights.group)
            if self._room(entry) is None:
                return
            inputs: Any = kind.read(entry)
            if not self._make_room(entry):
                return
            kind.load(entry, inputs, self.progress)
            del shared
            loaded = True
        except BaseException as error:  # noqa: BLE001 - a model's own code may do anything; its requests are told
            self._failed(entry, error)
        if not loaded:
            gc.collect()
        elif not starting:
            self.tell(f"loaded    {entry.name}  ({time.monotonic() - began:.1f} s)")

    def _kind_of(self, entry: PoolEntry) -> LanguageModels | SideModels:
        return self._language if entry.known.task is None else self._side

    def _room(self, entry: PoolEntry) -> list[str] | None:
        """Keys of the models that have to go for it; ``None``: it waits for them to be idle. Raises OutOfMemory."""
        if entry.known.is_reserved or entry.is_starting:  # whether that one fits is seen when its files are found
            return []
        limits = PoolLimits(self._builder.shared.usable, self._settings.max_loaded_models)
        with self._registry.lock:
            room, residents, running = self._registry.room, self._registry.residents(), self._builder.shared.running
            try:
                victims = room_for(entry.resident, residents, limits, running)
            except OutOfMemory as error:
                if not there_will_be_room(entry.resident, residents, limits):
                    raise
                room.add(entry, error)
                return None
            first = next(iter(room.entries), entry)
            if victims and first is not entry:
                what = f"{entry.name} waits for memory behind {first.name}, which others at work are in the way of."
                room.add(entry, OutOfMemory(what))
                return None
            return victims

    def _make_room(self, entry: PoolEntry) -> bool:
        """False: it has to wait after all. Raises OutOfMemory."""
        with self._registry.lock:
            victims = self._room(entry)
            if victims is None:
                return False
            self._registry.room.remove(entry)
            taken = self._registry.take(victims)
        for other in taken:
            self._unload(other)
        return True

    def _failed(self, entry: PoolEntry, error: BaseException) -> None:
        if not isinstance(error, StartLLMError):
            log.warning("%s could not be loaded", entry.name, exc_info=error)
            error = Internal(f"{entry.name} could not be loaded: {type(error).__name__}: {error}")
        error = error.again()  # its traceback holds what was loaded of the model
        if not isinstance(error, BadRequest | OutOfMemory | Unavailable):  # a faulty adapter is the client's own matter
            error.refusal = NOT_LOADABLE
        with self._registry.lock:
            entry.release()
            if entry.state != "stored":
                entry.move("failed")
            self._registry.room.remove(entry)
            if not isinstance(error, OutOfMemory | Unavailable):  # there may be room at any time
                entry.failure, entry.failed = error, time.monotonic()
            entry.give_up(error)
        if not self.stopping and not entry.is_starting:
            self.tell(f"not loaded {error.message}")

    def _unload(self, entry: PoolEntry) -> None:
        """Its state says so already, and nobody holds it. Who asks for it meanwhile gets it back afterwards."""
        _give_back(entry.name, self._kind_of(entry).unload(entry))
        with self._registry.lock:
            entry.move("unloaded")
            if entry.waiting:
                self._registry.order(entry, "wanted")
            self._registry.room.look_again()
        self.tell(f"unloaded  {entry.name}")

    def tell(self, line: str) -> None:
        """People are told if they can be: nothing depends on it."""
        try_all(line, lambda: self._say(line))


def _give_back(name: str, model: weakref.ref[Any] | None) -> None:
    """Weights and KV, before another model takes their place.

    A model points at itself in places, so the collector has to find it; and the thread that writes the end of its last
    answer may hold it for a moment longer. While the collector looks, no other thread does anything: not too often.
    """
    until = time.monotonic() + LINGER_SECONDS
    gc.collect()
    while model is not None and model() is not None:
        if time.monotonic() > until:
            log.warning("%s was unloaded, but something still holds its weights", name)
            return
        time.sleep(COLLECT_SECONDS)
        gc.collect()
