"""The models that were asked for, what state they are in, and who waits for them. Knows no MLX; any thread."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from start_llm.chat.handle import ModelHandle
from start_llm.core.audio import AudioTask
from start_llm.core.errors import QueueFull, StartLLMError, Unavailable
from start_llm.core.modelmap import MAIN_NAME
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.modelpool.active import ActiveModel
from start_llm.modelpool.known import KnownModel
from start_llm.modelpool.resolve import NameResolver
from start_llm.models.adapters import Chosen
from start_llm.models.room import Resident, Weights, outlived, to_free, together

RETRY_SECONDS = 60.0
"""A model that could not be loaded is not tried again for so long."""
BUSY_SECONDS = 5.0
"""What a client is told to wait for, if too many wait for models already."""
MAIN = ""
"""The model thread's name for the model that the server was started with."""

State = Literal["stored", "loading", "ready", "unloading"]


@dataclass(eq=False)
class PoolEntry:
    """A model that was asked for at least once. Guarded by the book's lock.

    Attributes:
        known: ``None`` for the main model.
        users: leases that are open.
        used: ``time.monotonic()`` of the last use.
        serving: while it is ready; of an audio model `audio`, which the model thread alone may use.
        card: as it was when it was loaded last.
        failure, failed: why it could not be loaded last, and when.
        lack: why it waits for room.
    """

    key: str
    settings: Settings
    known: KnownModel | None = None
    state: State = "stored"
    pinned: bool = False
    users: int = 0
    used: float = 0.0
    weights: Weights = field(default_factory=Weights)
    serving: ActiveModel | None = None
    audio: Any = None
    card: ModelCard | None = None
    failure: StartLLMError | None = None
    failed: float = 0.0
    lack: StartLLMError | None = None
    waiting: list[ModelLease] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.card.id if self.card is not None else self.known.name if self.known is not None else MAIN_NAME

    @property
    def task(self) -> AudioTask | None:
        """Of an audio model."""
        return None if self.known is None else self.known.stored.audio

    @property
    def resident(self) -> Resident:
        return Resident(self.key, self.name, self.weights, self.used, self.users > 0, self.pinned)


class ModelLease:
    """Implements `chat.handle.ModelLease`."""

    def __init__(self, book: ModelRegistry, entry: PoolEntry) -> None:
        self._book, self._entry = book, entry
        self.since = time.monotonic()
        self._settled = threading.Event()
        self._closed = False
        self._served: ModelHandle | None = None
        self._error: StartLLMError | None = None

    def settle(self, served: ModelHandle | None, error: StartLLMError | None = None) -> None:
        """`served`: ``None`` of an audio model, too."""
        self._served, self._error = served, error
        self._settled.set()

    def wait(self, seconds: float) -> bool:
        if self._settled.wait(seconds) if seconds else self._settled.is_set():
            return True
        stuck = self._book.stuck()
        if stuck is None:
            return False
        self.settle(None, stuck)
        return True

    @property
    def served(self) -> ModelHandle:
        self.check()
        if self._served is None:
            raise Unavailable("The request was given up before its model was loaded.")
        return self._served

    def check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    @property
    def audio(self) -> Any:
        """As `served`, of an audio model: a `Listener` or `Speaker` of the engine."""
        self.check()
        if self._closed or self._entry.audio is None:
            raise Unavailable("The request was given up before its model was loaded.")
        return self._entry.audio

    def close(self) -> None:
        with self._book.lock:
            if self._closed:
                return
            self._closed = True
            self._entry.users -= 1
            self._entry.used = time.monotonic()
            if self in self._entry.waiting:
                self._entry.waiting.remove(self)
            if not self._entry.users:
                self._book.look_again()
        self._settled.set()


class ModelRegistry:
    """
    Attributes:
        lock: guards all entries; every method takes it. Nothing waits inside of it.
        main: the model that the server was started with.
        wishes: entries for the loader, in whose state the wish is; ``None``: it shall end.
        short: those that are to be loaded and wait for room that others take, who waits for longest first. Guarded by
            the lock.
        stuck: why nothing can be loaded now, or ``None``: set by the loader. Any thread.
        gone: what the prompt pipelines of models that are unloaded had counted. Guarded by the lock.
    """

    def __init__(self, settings: Settings, names: NameResolver) -> None:
        self._names = names
        self._room_seconds = settings.pool_wait_seconds
        self._most_short = max(1, settings.http_threads // 2)  # each keeps a thread
        self._most_waiting = max(1, settings.http_threads * 3 // 4)
        self.lock = threading.RLock()
        self.main = PoolEntry(MAIN, settings, state="loading")
        self._entries: dict[str, PoolEntry] = {MAIN: self.main}
        self.wishes: SimpleQueue[PoolEntry | None] = SimpleQueue()
        self.short: list[PoolEntry] = []
        self.stuck: Callable[[], StartLLMError | None] = lambda: None
        self.gone: Counter[str] = Counter()

    def entries(self) -> list[PoolEntry]:
        """The main model's first."""
        with self.lock:
            return list(self._entries.values())

    def entry(self, known: KnownModel | None) -> PoolEntry:
        """``None``: the main model's."""
        if known is None:
            return self.main
        with self.lock:
            found = self._entries.get(known.key)
            if found is None:
                found = PoolEntry(known.key, self._names.settings_for(known), known, weights=self._names.weights(known))
                found.pinned = self._names.is_pinned(*known.aliases)
                self._entries[known.key] = found
            else:
                self._compare(found, known)
            return found

    def _compare(self, entry: PoolEntry, known: KnownModel) -> None:
        """Its files may be others now, or its name. A request that runs goes on with what it began with, and so does a
        loaded model of the same name.
        """
        before = entry.known
        if before is None or _files(before) == _files(known):
            return
        renamed = before.name != known.name
        if entry.state == "ready" and (renamed or known.adapter is not None) and not entry.users:
            self.send_away(entry)
        if entry.state == "stored":
            entry.weights = self._names.weights(known)
        if entry.state in {"stored", "unloading"}:
            entry.known, entry.settings = known, self._names.settings_for(known)
            entry.card = None if renamed else entry.card
            entry.failure = entry.failure if known.adapter is None else None

    def loaded_as(self, name: str) -> KnownModel | None:
        """A language model of that name that is in memory, whether it is still on the disk or not; no adapter's."""
        with self.lock:
            known = (entry.known for entry in self._entries.values() if entry.serving is not None)
            return next((each for each in known if each and not each.adapter and name in each.aliases), None)

    def forget(self, there: Collection[KnownModel]) -> None:
        """Idle models that are not on the disk any more. One that is loaded goes only if its name is another's now, or
        its adapter is not there.
        """
        now, names = {known.key: known for known in there}, {known.name for known in there}
        with self.lock:
            for entry in list(self._entries.values()):
                if entry.key in now:
                    self._compare(entry, now[entry.key])
                elif entry is self.main or entry.users:
                    continue
                elif entry.state == "stored":
                    del self._entries[entry.key]
                elif entry.state == "ready" and (entry.name in names or (entry.known and entry.known.adapter)):
                    self.send_away(entry)

    def lease(self, known: KnownModel | None) -> ModelLease:
        """Raises why the model could not be loaded, if that was a short while ago.

        Who waits for a model keeps an HTTP thread. Some of those stay free for the models that are there: QueueFull.
        """
        with self.lock:
            entry = self.entry(known)
            _check(entry)
            lease = ModelLease(self, entry)
            if entry.state == "ready":
                lease.settle(None if entry.serving is None else entry.serving.served)
            elif (stuck := self.stuck()) is not None:
                raise stuck
            elif (waiting := sum(len(each.waiting) for each in self._entries.values())) >= self._most_waiting:
                raise QueueFull(
                    f"{entry.name} is not loaded, and {waiting} requests wait for models already (HTTP_THREADS); "
                    "the others are for models that are loaded.",
                    retry_after=BUSY_SECONDS,
                )
            else:
                if entry.state == "stored":
                    self.wish_for(entry)
                entry.waiting.append(lease)
            entry.users += 1  # last: what was counted and goes wrong would hold the model for ever
            entry.used = time.monotonic()
            return lease

    def wish_for(self, entry: PoolEntry) -> None:
        with self.lock:
            entry.state = "loading"
            self.wishes.put(entry)

    def look_again(self) -> None:
        """There may be room now for the model that waits for it for longest."""
        with self.lock:
            if self.short:
                self.wishes.put(self.short[0])

    def wait_for_room(self, entry: PoolEntry, lack: StartLLMError) -> None:
        with self.lock:
            entry.lack = lack
            if entry not in self.short:
                self.short.append(entry)
            self.end_waits()

    def no_longer_short(self, entry: PoolEntry) -> None:
        with self.lock:
            if entry in self.short:
                self.short.remove(entry)

    def end_waits(self) -> None:
        """Who has waited for room long enough is told, and so is who would keep too many threads waiting."""
        with self.lock:
            before, left = time.monotonic() - self._room_seconds, self._most_short
            for entry in list(self.short):
                assert entry.lack is not None
                self.give_up(entry, entry.lack.again(), before, most=left)
                left -= len(entry.waiting)
                if not entry.waiting:
                    self.short.remove(entry)
                    entry.state = "stored"

    def send_away(self, entry: PoolEntry) -> None:
        with self.lock:
            entry.state = "unloading"
            self.wishes.put(entry)

    def send_old_away(self, seconds: float) -> None:
        """Those that were not used for so long; 0: none."""
        with self.lock:
            for key in outlived(self.residents(), time.monotonic(), seconds):
                self.send_away(self._entries[key])

    def reclaim(self, need: int) -> bool:
        """Sends idle models away for `need` more bytes. False: there are not so many, and all stay."""
        with self.lock:
            staying = self.residents()
            leaving = [entry.weights for entry in self._entries.values() if entry.state == "unloading"]
            stays = [each.weights for each in staying]
            going = to_free(need - (together([*stays, *leaving]) - together(stays)), staying)
            if going is None:
                return False
            for key in going:
                self.send_away(self._entries[key])
        return True

    def pinned_weights(self, key: str) -> list[Weights]:
        """Of loaded models that never go for the one of this key."""
        return [each.weights for each in self.residents() if each.pinned and each.key != key]

    def take(self, keys: Iterable[str]) -> list[PoolEntry]:
        """These are about to be unloaded by who asks, and so are those that were sent away before."""
        with self.lock:
            for key in keys:
                self._entries[key].state = "unloading"
            return [entry for entry in self._entries.values() if entry.state == "unloading"]

    def ready(self, entry: PoolEntry, serving: ActiveModel) -> None:
        with self.lock:
            entry.serving, entry.card, entry.weights = serving, serving.card, serving.built.loaded.weights
            self._settle(entry, serving.served)

    def ready_to_hear(self, entry: PoolEntry, audio: Any) -> None:
        """The same of an audio model."""
        with self.lock:
            entry.audio, entry.weights = audio, Weights(audio.nbytes)
            self._settle(entry, None)

    def _settle(self, entry: PoolEntry, served: ModelHandle | None) -> None:
        entry.state, entry.failure, entry.used = "ready", None, time.monotonic()
        for lease in entry.waiting:
            lease.settle(served)
        entry.waiting.clear()

    def give_up(self, entry: PoolEntry, error: StartLLMError, before: float = math.inf, most: int = 0) -> None:
        """Who has waited for it since `before` (``time.monotonic()``) waits no more; of the others `most` do."""
        with self.lock:
            younger = [lease for lease in entry.waiting if lease.since > before][: max(0, most)]
            for lease in entry.waiting:
                if lease not in younger:
                    lease.settle(None, error)
            entry.waiting = younger

    def residents(self) -> list[Resident]:
        with self.lock:
            return [entry.resident for entry in self._entries.values() if entry.state == "ready"]


def _files(known: KnownModel) -> tuple[str, int, Chosen | None]:
    """Differs once the files of a model, or of its adapter, do, or its name."""
    return known.name, known.stored.size, known.adapter


def _check(entry: PoolEntry) -> None:
    """Raises why the model could not be loaded a short while ago."""
    past = time.monotonic() - entry.failed
    if entry.failure is None or entry.state != "stored":
        return
    if past >= RETRY_SECONDS:
        entry.failure = None
        return
    raise _again(entry.failure, entry.name, past)


def _again(error: StartLLMError, name: str, past: float) -> StartLLMError:
    """The same error, said again."""
    left = RETRY_SECONDS - past
    sentence = f"{name} could not be loaded {past:.0f} s ago, and is tried again in {left:.0f} s: {error.message}"
    same = StartLLMError(sentence, param=error.param, code=error.code)
    same.status, same.type = error.status, error.type
    same.retry_after, same.refusal = left, error.refusal
    return same
