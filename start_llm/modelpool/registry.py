"""The models that were asked for: the state of each, who uses it, who waits for it. Knows no MLX; any thread.

Each model has one `PoolEntry`, whose state changes in `PoolEntry.move` only, as `_NEXT` allows (docs/modelpool.md tells
what each event means). Two rules hold it together. A model with users is never evicted: a lease counts from the moment
at which it is made. And the state says what is to be done, the queue only when: an entry that comes out of the queue in
another state than ``loading`` or ``unloading`` has nothing to be done.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from start_llm.core.errors import QueueFull, StartLLMError, Unavailable
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.engine.runtime import TextRuntime
from start_llm.modelpool.resolve import KnownModel, NameResolver
from start_llm.models.adapter import StoredAdapter
from start_llm.models.room import Resident, Weights, outlived, to_free, together

RETRY_SECONDS = 60.0
"""A model that could not be loaded is not tried again for so long."""
BUSY_SECONDS = 5.0
"""What a client is told to wait for, if too many wait for models already."""
LOOK_SECONDS = 1.0
"""How often one that waits for its model looks whether the loader hangs."""

State = Literal["stored", "loading", "ready", "unloading"]
Event = Literal["wanted", "unwanted", "loaded", "failed", "evicted", "unloaded"]
_NEXT: dict[tuple[State, Event], State] = {
    ("stored", "wanted"): "loading",
    ("loading", "unwanted"): "stored",
    ("loading", "loaded"): "ready",
    ("loading", "failed"): "stored",
    ("ready", "failed"): "stored",
    ("ready", "evicted"): "unloading",
    ("unloading", "evicted"): "unloading",
    ("unloading", "unloaded"): "stored",
    ("unloading", "failed"): "stored",
}


@dataclass(eq=False)
class PoolEntry:
    """A model that was asked for at least once. Guarded by the registry's lock.

    While it is ready, `handle` is what a request may use: a `ModelHandle`, or of a model that is no language model a
    `Transcriber`, `Speaker` or `Encoder`, whose arrays the model thread alone may use.
    """

    key: str  # its name on the model thread
    settings: Settings
    known: KnownModel
    state: State = "stored"
    pinned: bool = False
    users: int = 0  # leases that are open
    used: float = 0.0  # ``time.monotonic()`` of the last use
    weights: Weights = field(default_factory=Weights)
    handle: Any = None
    runtime: TextRuntime | None = None  # of a language model that is ready
    card: ModelCard | None = None  # of a language model, as it was when it was loaded last
    failure: StartLLMError | None = None  # why it could not be loaded last
    failed: float = 0.0  # when that was
    waiting: list[ModelLease] = field(default_factory=list)

    def move(self, event: Event) -> None:
        """The only place that changes the state. KeyError: the event cannot come in this state."""
        self.state = _NEXT[self.state, event]

    @property
    def name(self) -> str:
        return self.card.id if self.card is not None else self.known.name

    @property
    def is_starting(self) -> bool:
        """It is the main model, and has never been loaded."""
        return self.known.default and self.card is None

    @property
    def resident(self) -> Resident:
        ttl = self.settings.model_ttl_seconds
        return Resident(self.key, self.name, self.weights, self.used, self.users > 0, self.pinned, ttl)

    def release(self) -> Any:
        """Gives up what holds the model's arrays. Returns its handle, ``None`` if it has none."""
        handle, self.handle, self.runtime = self.handle, None, None
        return handle

    def give_up(self, error: StartLLMError, before: float = math.inf, most: int = 0) -> None:
        """Fails those who have waited since `before` (``time.monotonic()``) or longer; of the others, `most` stay."""
        younger = [lease for lease in self.waiting if lease.since > before][: max(0, most)]
        for lease in self.waiting:
            if lease not in younger:
                lease.settle(error=error)
        self.waiting = younger

    def check(self) -> None:
        """Raises why the model could not be loaded a short while ago."""
        past = time.monotonic() - self.failed
        if self.failure is None or self.state != "stored":
            return
        if past >= RETRY_SECONDS:
            self.failure = None
            return
        error, left = self.failure.again(), RETRY_SECONDS - past
        times = f"{past:.0f} s ago, and is tried again in {left:.0f} s"
        error.message = f"{self.name} could not be loaded {times}: {error.message}"
        error.args, error.retry_after = (error.message,), left
        raise error


class ModelLease:
    """Implements `chat.handle.Lease`."""

    def __init__(self, registry: ModelRegistry, entry: PoolEntry) -> None:
        self._registry, self._entry = registry, entry
        self.since = time.monotonic()
        self._settled = threading.Event()
        self._closed = False
        self._handle: Any = None
        self._error: StartLLMError | None = None

    def settle(self, handle: Any = None, error: StartLLMError | None = None) -> None:
        """Ends the wait, with one of them."""
        self._handle, self._error = handle, error
        self._settled.set()

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._settled.wait(max(0.0, min(LOOK_SECONDS, until - time.monotonic()))):
            stuck = self._registry.stuck()
            if stuck is not None:
                self.settle(error=stuck)
            elif time.monotonic() >= until:
                return False
        return True

    @property
    def handle(self) -> Any:
        self.check()
        if self._handle is None:
            raise Unavailable("The request was given up before its model was loaded.")
        return self._handle

    def check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def close(self) -> None:
        with self._registry.lock:
            if self._closed:
                return
            self._closed = True
            self._entry.users -= 1
            self._entry.used = time.monotonic()
            if self in self._entry.waiting:
                self._entry.waiting.remove(self)
            if not self._entry.users:
                self._registry.room.look_again()
        self._handle = None
        self._settled.set()


class RoomQueue:
    """The models that are to be loaded and wait until others have left room; who is waited for longest comes first.

    Each request that waits keeps an HTTP thread: together they never keep more than half of them.
    """

    def __init__(self, settings: Settings, lock: threading.RLock, load_queue: SimpleQueue[PoolEntry | None]) -> None:
        self._lock, self._load_queue = lock, load_queue
        self._seconds = settings.pool_wait_seconds
        self._most_waiting = max(1, settings.http_threads // 2)
        self.lacks: dict[PoolEntry, StartLLMError] = {}  # what those are told who wait in vain

    @property
    def entries(self) -> list[PoolEntry]:
        with self._lock:
            return list(self.lacks)

    def add(self, entry: PoolEntry, lack: StartLLMError) -> None:
        with self._lock:
            self.lacks[entry] = lack
            self.end_waits()

    def remove(self, entry: PoolEntry) -> None:
        with self._lock:
            self.lacks.pop(entry, None)

    def look_again(self) -> None:
        """There may be room now for the first."""
        with self._lock:
            for entry in self.entries[:1]:
                self._load_queue.put(entry)

    def end_waits(self) -> None:
        """Who has waited long enough is told, and so is who would keep too many threads."""
        with self._lock:
            before, left = time.monotonic() - self._seconds, self._most_waiting
            for entry, lack in list(self.lacks.items()):
                entry.give_up(lack.again(), before, most=left)
                left -= len(entry.waiting)
                if not entry.waiting:
                    self.remove(entry)
                    entry.move("unwanted")


class ModelRegistry:
    """`lock` guards all entries; every method takes it. Nothing waits inside of it."""

    def __init__(self, settings: Settings, names: NameResolver) -> None:
        self.settings, self.names = settings, names
        self._most_waiting = max(1, settings.http_threads * 3 // 4)
        self.lock = threading.RLock()
        self._entries: dict[str, PoolEntry] = {}
        self.default = self.entry(names.default)  # the model that the server was started with
        # For the loader; the states of entries say what is to be done. ``None``: it shall end.
        self.load_queue: SimpleQueue[PoolEntry | None] = SimpleQueue()
        self.room = RoomQueue(settings, self.lock, self.load_queue)
        self.stuck: Callable[[], StartLLMError | None] = lambda: None  # why nothing can be loaded; set by the loader
        self.counted: Counter[str] = Counter()  # by prompt pipelines of models that are unloaded; guarded by the lock

    def entries(self) -> list[PoolEntry]:
        """The main model's first."""
        with self.lock:
            return list(self._entries.values())

    def entry(self, known: KnownModel) -> PoolEntry:
        """The model's entry. A new one is made without the lock: its files are read, and a disk may be slow."""
        while True:
            with self.lock:
                if (found := self._entries.get(known.entry_key)) is not None:
                    self._compare(found, known)
                    return found
            weights, pinned = self.names.weights(known), self.names.is_pinned(known)
            made = PoolEntry(known.entry_key, self.names.settings_for(known), known, pinned=pinned, weights=weights)
            with self.lock:
                self._entries.setdefault(known.entry_key, made)

    def _compare(self, entry: PoolEntry, known: KnownModel) -> None:
        """Its files may be others now, or its name. A request that runs goes on with what it began with, and so does a
        loaded model of the same name. The main model is looked at when it is loaded.
        """
        if known.default or _files(entry.known) == _files(known):
            return
        renamed = entry.known.name != known.name
        if entry.state == "ready" and (renamed or known.adapter is not None) and not entry.users:
            self.order(entry, "evicted")
        if entry.state == "stored":
            entry.weights = self.names.weights(known)
        if entry.state in {"stored", "unloading"}:
            entry.known, entry.settings = known, self.names.settings_for(known)
            entry.card = None if renamed else entry.card
            entry.failure = entry.failure if known.adapter is None else None

    def loaded_as(self, name: str) -> KnownModel | None:
        """A language model of that name that is in memory, whether it is still on the disk or not; no adapter's."""
        with self.lock:
            known = (entry.known for entry in self._entries.values() if entry.runtime is not None)
            return next((each for each in known if not each.adapter and name in each.aliases), None)

    def forget(self, there: Collection[KnownModel]) -> None:
        """Idle models that left the disk; a loaded one only if its name is another's now, or its adapter is gone."""
        now, names = {known.entry_key: known for known in there}, {known.name for known in there}
        with self.lock:
            for entry in list(self._entries.values()):
                if entry.key in now:
                    self._compare(entry, now[entry.key])
                elif entry.known.default or entry.known.is_reserved or entry.users:
                    continue
                elif entry.state == "stored":
                    del self._entries[entry.key]
                elif entry.state == "ready" and (entry.name in names or entry.known.adapter):
                    self.order(entry, "evicted")

    def lease(self, known: KnownModel) -> ModelLease:
        """Raises why the model could not be loaded, if that was a short while ago. QueueFull: who waits for a model
        keeps an HTTP thread, and some of those stay free for the models that are there.
        """
        self.entry(known)  # not with the lock held
        with self.lock:
            entry = self.entry(known)
            entry.check()
            lease = ModelLease(self, entry)
            if entry.state == "ready":
                lease.settle(entry.handle)
            elif (stuck := self.stuck()) is not None:
                raise stuck
            elif (waiting := sum(len(each.waiting) for each in self._entries.values())) >= self._most_waiting:
                why = f"{entry.name} is not loaded, and {waiting} requests wait for models already (HTTP_THREADS)"
                raise QueueFull(f"{why}; the others are for models that are loaded.", retry_after=BUSY_SECONDS)
            else:
                if entry.state == "stored":
                    self.order(entry, "wanted")
                entry.waiting.append(lease)
            entry.users += 1  # last: what was counted and goes wrong would hold the model for ever
            entry.used = time.monotonic()
            return lease

    def order(self, entry: PoolEntry, event: Literal["wanted", "evicted"]) -> None:
        """Has the loader bring the model in, or take it out."""
        with self.lock:
            entry.move(event)
            self.load_queue.put(entry)

    def evict_idle(self, seconds: float | None = None) -> None:
        """Those that were not used for so long, but for the main one; ``None``: all, for their own time to live."""
        with self.lock:
            for key in outlived(self.residents(), time.monotonic(), seconds):
                if seconds is None or self._entries[key] is not self.default:
                    self.order(self._entries[key], "evicted")

    def reclaim(self, need: int) -> bool:
        """Evicts idle models for `need` more bytes. False: there are not so many, and all stay."""
        with self.lock:
            staying = self.residents()
            leaving = [entry.weights for entry in self._entries.values() if entry.state == "unloading"]
            stays = [each.weights for each in staying]
            victims = to_free(need - (together([*stays, *leaving]) - together(stays)), staying)
            for key in victims or ():
                self.order(self._entries[key], "evicted")
        return victims is not None

    def take(self, keys: Iterable[str]) -> list[PoolEntry]:
        """These are about to be unloaded by who asks, and so are those that were evicted before."""
        with self.lock:
            for key in keys:
                self._entries[key].move("evicted")
            return [entry for entry in self._entries.values() if entry.state == "unloading"]

    def ready(
        self,
        entry: PoolEntry,
        handle: Any,
        weights: Weights,
        runtime: TextRuntime | None = None,
        card: ModelCard | None = None,
    ) -> None:
        """It is loaded: whoever waits gets `handle`."""
        with self.lock:
            if entry.known.default:
                entry.known = self.names.default
                entry.pinned = self.names.is_pinned(entry.known) if entry.is_starting else entry.pinned
            entry.handle = handle
            entry.weights = weights
            entry.runtime = runtime
            entry.card = card
            entry.move("loaded")
            entry.failure, entry.used = None, time.monotonic()
            for lease in entry.waiting:
                lease.settle(handle)
            entry.waiting.clear()

    def residents(self) -> list[Resident]:
        """The loaded models that share the memory."""
        with self.lock:
            found = [entry for entry in self._entries.values() if entry.state == "ready"]
            return [entry.resident for entry in found if not entry.known.is_reserved]


def _files(known: KnownModel) -> tuple[str, int, StoredAdapter | None]:
    """Differs once the files of a model, or of its adapter, do, or its name."""
    return known.name, known.stored.size, known.adapter
