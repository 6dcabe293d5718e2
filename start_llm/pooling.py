"""The models that there are, and which of them are loaded. Implements `served.Models`.

One thread of its own, the loader, brings models in and out: it reads what needs no MLX, asks the model thread for the
rest in steps, and decides (`models.pool`) who has to go for whom. Everything else only looks, or leaves a wish.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal

from start_llm.building import Built, ModelBuilder
from start_llm.core.errors import Conflict, Internal, NotFound, OutOfMemory, StartLLMError, Unavailable
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.engine.thread import SHUTTING_DOWN, EngineThread
from start_llm.models.capabilities import read_config
from start_llm.models.names import Known
from start_llm.models.pool import Limits, Resident, outlived, room_for, to_free
from start_llm.poolnames import PoolNames
from start_llm.prompt.clients import Clients
from start_llm.served import Served
from start_llm.serving import Serving, serve

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""A model that could not be loaded is not tried again for so long."""
LOOK_SECONDS = 1.0
UNLOAD_SECONDS = 60.0
"""What a client that has a model unloaded waits for at most."""
MAIN = ""
"""The model thread's name for the model that the server was started with."""

State = Literal["stored", "loading", "ready", "unloading"]


@dataclass(eq=False)
class _Entry:
    """A model that was asked for at least once. Guarded by the pool's lock.

    Attributes:
        known: ``None`` for the main model.
        users: leases that are open.
        used: ``time.monotonic()`` of the last use.
        serving: while it is ready.
        card: as it was when it was loaded last.
        failure, failed: why it could not be loaded last, and when.
    """

    key: str
    settings: Settings
    known: Known | None = None
    state: State = "stored"
    pinned: bool = False
    users: int = 0
    used: float = 0.0
    weights: int = 0
    serving: Serving | None = None
    card: ModelCard | None = None
    failure: StartLLMError | None = None
    failed: float = 0.0
    waiting: list[_Lease] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.card.id if self.card is not None else self.known.name if self.known is not None else "default"

    @property
    def resident(self) -> Resident:
        return Resident(self.key, self.name, self.weights, self.used, self.users > 0, self.pinned)


class _Lease:
    """Implements `served.Lease`."""

    def __init__(self, pool: Pool, entry: _Entry) -> None:
        self._pool, self._entry = pool, entry
        self._settled = threading.Event()
        self._closed = False
        self._served: Served | None = None
        self._error: StartLLMError | None = None

    def settle(self, served: Served | None, error: StartLLMError | None = None) -> None:
        self._served, self._error = served, error
        self._settled.set()

    def wait(self, seconds: float) -> bool:
        return self._settled.wait(seconds) if seconds else self._settled.is_set()

    @property
    def served(self) -> Served:
        if self._error is not None:
            raise self._error
        if self._served is None:
            raise Unavailable("The request was given up before its model was loaded.")
        return self._served

    def close(self) -> None:
        with self._pool.lock:
            if self._closed:
                return
            self._closed = True
            self._entry.users -= 1
            self._entry.used = time.monotonic()
            if self in self._entry.waiting:
                self._entry.waiting.remove(self)
        self._settled.set()


class Pool:
    """
    Args:
        say: tells people what is loaded and unloaded.

    Attributes:
        lock: guards all entries. Nothing waits inside of it.
    """

    def __init__(self, settings: Settings, clients: Clients, say: Callable[[str], None]) -> None:
        self._settings, self._clients, self._say = settings, clients, say
        self.lock = threading.RLock()
        self.names = PoolNames(settings)
        self._main = _Entry(MAIN, settings, state="loading")
        self._entries: dict[str, _Entry] = {MAIN: self._main}
        self._wishes: SimpleQueue[_Entry | None] = SimpleQueue()
        self._gone: Counter[str] = Counter()
        self._stopping = False
        self._engine: EngineThread
        self._builder: ModelBuilder
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def connect(self, engine: EngineThread, builder: ModelBuilder) -> None:
        """To be called once, before anything else."""
        self._engine, self._builder = engine, builder

    # --- start and stop: the app's thread ---------------------------------------------

    def begin(self, built: Built) -> ModelCard:
        """The main model is loaded. Raises NotSupported if it cannot be served."""
        serving = self._serve(self._main, built)
        with self.lock:
            self._main.pinned = self.names.is_pinned(serving.served.name, serving.served.source)
            self._ready(self._main, serving)
        self.names.began(serving.served.name, serving.served.source)
        self._thread.start()
        for name in self._settings.preloaded:
            try:
                self.open(name).close()
            except StartLLMError as error:
                self._say(f"preload   {error.message}")
        return serving.card

    def stop(self) -> None:
        """After the model thread's end. May be called twice."""
        self._stopping = True
        self._wishes.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)
        with self.lock:
            entries = list(self._entries.values())
        for entry in entries:
            with self.lock:
                serving, entry.serving = entry.serving, None
                self._settle(entry, Unavailable(SHUTTING_DOWN))
            if serving is not None:
                serving.close()

    @property
    def main_serving(self) -> Serving | None:
        """The main model, while it is loaded."""
        return self._main.serving

    # --- served.Models: any thread ----------------------------------------------------

    def open(self, name: str) -> _Lease:
        if self._main.card is None:
            raise Unavailable(self._engine.status().detail or "The model is still loading.")
        known = self.names.find(name)
        with self.lock:
            entry = self._entry(known)
            self._check(entry)
            lease = _Lease(self, entry)
            entry.users += 1
            entry.used = time.monotonic()
            if entry.serving is not None and entry.state == "ready":
                lease.settle(entry.serving.served)
                return lease
            entry.waiting.append(lease)
            if entry.state == "stored":
                self._wish_for(entry)
            return lease

    @property
    def main(self) -> ModelCard | None:
        return self._main.card

    def cards(self) -> tuple[ModelCard, ...]:
        if self._main.card is None:
            return ()
        listed = self.names.all()
        with self.lock:
            asked = [entry for entry in self._entries.values() if entry is not self._main]
            cards = [self._card(self._main), *(self._card(entry) for entry in asked)]
            cards += [self._stored_card(known) for known in listed if known.key not in self._entries]
        return tuple(cards)

    def other_names(self) -> list[tuple[str, ModelCard]]:
        """By which other models may be asked for, patterns of MODEL_MAP included (LiteLLM knows no ``?`` in them)."""
        main, *others = self.cards()
        names = [(card.id, card) for card in others]
        by_name = {card.id: card for card in others}
        for entry in self._settings.models_by_name.entries:
            meant = by_name.get(self.served_name(entry.model))
            if meant is not None and meant.id != main.id and "?" not in entry.pattern:
                names.append((entry.pattern, meant))
        return names

    def card(self, name: str) -> ModelCard:
        known = self.names.find(name)
        with self.lock:
            return self._card(self._entry(known))

    def served_name(self, asked: str) -> str:
        main = self._main.card
        if main is None:
            return asked
        try:
            known = self.names.find(asked)
        except NotFound:
            return asked
        return main.id if known is None else known.name

    def token_text(self, token: int, name: str) -> str:
        try:
            known = self.names.find(name)
        except NotFound:
            return ""
        with self.lock:
            serving = self._entry(known).serving
        return "" if serving is None else serving.served.token_text(token)

    def unload(self, name: str) -> ModelCard:
        known = self.names.find(name)
        with self.lock:
            entry = self._entry(known)
            if entry.users:
                raise Conflict(f"{entry.name} has {entry.users} requests at work or waiting; end them first.")
            if entry.state == "ready":
                self._send_away(entry)
        until = time.monotonic() + UNLOAD_SECONDS
        while entry.state == "unloading" and time.monotonic() < until and not self._stopping:
            time.sleep(0.02)
        with self.lock:
            return self._card(entry)

    def pin(self, name: str, pinned: bool) -> ModelCard:
        known = self.names.find(name)
        with self.lock:
            entry = self._entry(known)
            entry.pinned = pinned
            return self._card(entry)

    def figures(self) -> Mapping[str, float]:
        """Counters of all prompt pipelines, and of the pool itself, by the names that `/metrics` shows."""
        with self.lock:
            found = Counter(self._gone)
            loaded = [entry.serving for entry in self._entries.values() if entry.serving is not None]
        for serving in loaded:
            found.update(serving.served.pipeline.counters())
        return {f"prompt_{name}": value for name, value in found.items()} | {"models_loaded": len(loaded)}

    # --- the model thread ---------------------------------------------------------------

    def reclaim(self, need: int) -> bool:
        """Sends idle models away for `need` more bytes of KV. False: there are not so many."""
        with self.lock:
            need -= sum(entry.weights for entry in self._entries.values() if entry.state == "unloading")
            going = to_free(need, self._residents())
            if going is None:
                return False
            for key in going:
                self._send_away(self._entries[key])
        return True

    # --- under the lock -----------------------------------------------------------------

    def _entry(self, known: Known | None) -> _Entry:
        """``None``: the main model's."""
        if known is None:
            return self._main
        found = self._entries.get(known.key)
        if found is None:
            found = _Entry(known.key, self.names.settings_for(known), known, weights=known.stored.size)
            found.pinned = self.names.is_pinned(*known.aliases)
            self._entries[known.key] = found
        return found

    def _check(self, entry: _Entry) -> None:
        """Raises why the model could not be loaded a short while ago."""
        past = time.monotonic() - entry.failed
        if entry.failure is None or entry.state != "stored":
            return
        if past >= RETRY_SECONDS:
            entry.failure = None
            return
        raise _again(entry.failure, entry.name, past)

    def _wish_for(self, entry: _Entry) -> None:
        entry.state = "loading"
        self._wishes.put(entry)

    def _send_away(self, entry: _Entry) -> None:
        entry.state = "unloading"
        self._wishes.put(entry)

    def _ready(self, entry: _Entry, serving: Serving) -> None:
        entry.serving, entry.card, entry.state, entry.failure = serving, serving.card, "ready", None
        entry.weights, entry.used = serving.card.weight_bytes, time.monotonic()
        for lease in entry.waiting:
            lease.settle(serving.served)
        entry.waiting.clear()

    def _settle(self, entry: _Entry, error: StartLLMError) -> None:
        """Nobody waits for it any more."""
        for lease in entry.waiting:
            lease.settle(None, error)
        entry.waiting.clear()

    def _residents(self) -> list[Resident]:
        return [entry.resident for entry in self._entries.values() if entry.state == "ready"]

    def _card(self, entry: _Entry) -> ModelCard:
        card = entry.card if entry.card is not None else self._stored_card(entry.known) if entry.known else None
        assert card is not None, "the main model has one from its start on"
        kv = entry.serving.built.kv_bytes() if entry.serving is not None else 0
        failed = entry.failure is not None and entry.state == "stored"
        return replace(
            card,
            state="failed" if failed else entry.state,
            pinned=entry.pinned,
            kv_bytes=kv,
            problem=entry.failure.message if failed and entry.failure is not None else "",
        )

    def _stored_card(self, known: Known) -> ModelCard:
        stored, most = known.stored, self._settings.max_kv_size
        return ModelCard(
            known.name,
            int(stored.folder.stat().st_mtime) if stored.folder.exists() else 0,
            min(most, stored.context or most),
            tools="tools" in stored.can,
            reasoning="reasoning" in stored.can,
            vision="images" in stored.can and self._settings.vision == "auto",
            images="shown" if "images" in stored.can else self._settings.images_on_text_model,
            state="stored",
            pinned=self.names.is_pinned(*known.aliases),
            weight_bytes=stored.size,
            details={"source": known.source},
        )

    # --- the loader's thread ----------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                entry = self._wishes.get(timeout=LOOK_SECONDS)
            except Empty:
                self._send_the_old_away()
                continue
            if entry is None or self._stopping:
                return
            try:
                if entry.state == "loading":
                    self._load(entry)
                elif entry.state == "unloading":
                    self._unload(entry)
            except Exception:  # the thread's edge: it must serve the next wish
                log.warning("the loader met an unexpected error", exc_info=True)

    def _send_the_old_away(self) -> None:
        with self.lock:
            for key in outlived(self._residents(), time.monotonic(), self._settings.model_ttl_seconds):
                self._send_away(self._entries[key])

    def _load(self, entry: _Entry) -> None:
        with self.lock:
            if not entry.waiting and entry.users == 0 and not self.names.is_preloaded(entry.name):
                entry.state = "stored"  # whoever wanted it has gone
                return
        began = time.monotonic()
        try:
            self._make_room(entry)
            serving = self._bring_in(entry)
        except BaseException as error:  # noqa: BLE001 - a model's own code may do anything; its requests are told
            self._failed(entry, error)
            return
        with self.lock:
            self._ready(entry, serving)
        self._say(f"loaded    {entry.name}  ({time.monotonic() - began:.1f} s)")

    def _make_room(self, entry: _Entry) -> None:
        """Raises OutOfMemory."""
        limits = Limits(self._builder.usable, self._settings.max_loaded_models)
        with self.lock:
            residents, running = self._residents(), self._builder.running
            going = [self._entries[key] for key in room_for(entry.name, entry.weights, residents, limits, running)]
            for other in going:
                other.state = "unloading"
        for other in going:
            self._unload(other)

    def _bring_in(self, entry: _Entry) -> Serving:
        ahead, folder = None, None if entry.known is None else entry.known.stored.folder
        if folder is not None:
            ahead = self._builder.read(entry.settings, folder, read_config(folder).get("eos_token_id"))
        built: list[Built] = []
        steps = self._builder.steps(entry.settings, entry.key, entry.weights, built.append, ahead)
        self._engine.load(entry.key, steps)
        try:
            return self._serve(entry, built[0])
        except BaseException:
            self._engine.unload(entry.key)
            raise

    def _serve(self, entry: _Entry, built: Built) -> Serving:
        def anchor(guess: Any, session: str) -> None:
            self._engine.anchor(guess, session, entry.key)

        return serve(entry.settings, self._clients, built, entry.key, int(time.time()), anchor)

    def _failed(self, entry: _Entry, error: BaseException) -> None:
        if not isinstance(error, StartLLMError):
            log.warning("%s could not be loaded", entry.name, exc_info=error)
            error = Internal(f"{entry.name} could not be loaded: {type(error).__name__}: {error}")
        with self.lock:
            entry.state = "stored"
            if not isinstance(error, OutOfMemory | Unavailable):  # there may be room at any time
                entry.failure, entry.failed = error, time.monotonic()
            self._settle(entry, error)
        if not self._stopping:
            self._say(f"not loaded {error.message}")

    def _unload(self, entry: _Entry) -> None:
        """Its state says so already, and nobody holds it. Who asks for it meanwhile gets it back afterwards."""
        with self.lock:
            serving, entry.serving = entry.serving, None
        if serving is not None:
            serving.served.recorder.close()
            try:
                self._engine.unload(entry.key)
            finally:
                serving.served.pipeline.close()
                with self.lock:
                    self._gone.update(serving.served.pipeline.counters())
        del serving
        gc.unfreeze()  # what was there at the start, too
        gc.collect()
        with self.lock:
            entry.state = "stored"
            if entry.waiting:
                self._wish_for(entry)
        self._say(f"unloaded  {entry.name}")


def _again(error: StartLLMError, name: str, past: float) -> StartLLMError:
    """The same error, said again."""
    left = RETRY_SECONDS - past
    sentence = f"{name} could not be loaded {past:.0f} s ago, and is tried again in {left:.0f} s: {error.message}"
    same = StartLLMError(sentence, param=error.param, code=error.code)
    same.status, same.type = error.status, error.type
    same.retry_after = left
    return same
