"""The loader's thread: brings models in and out, one at a time.

It reads what needs no MLX, asks the model thread for the rest in steps, and decides (`models.room`) who has to go for
whom.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator
from queue import Empty
from typing import Any

from start_llm.audio import speech as speaking
from start_llm.audio import transcription as hearing
from start_llm.audio.samples import check_installed
from start_llm.chat.handle import ModelHandle
from start_llm.core.errors import (
    NOT_LOADABLE,
    BadRequest,
    Internal,
    NotFound,
    NotSupported,
    OutOfMemory,
    StartLLMError,
    Unavailable,
)
from start_llm.core.settings import Settings
from start_llm.engine.thread import EngineThread
from start_llm.modelpool.active import ActiveModel, serve
from start_llm.modelpool.builder import Built, ModelBuilder, PreloadedFiles
from start_llm.modelpool.registry import ModelRegistry, PoolEntry
from start_llm.modelpool.resolve import NameResolver
from start_llm.models.checkpoint import CheckpointError, check_source, read_config
from start_llm.models.room import PoolLimits, room_for, there_will_be_room
from start_llm.prompt.clients import Clients

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""How long a model that is unloaded is waited for to be out of memory."""
COLLECT_SECONDS = 0.1
"""Between two looks at whether it is."""


class Loader:
    """Does what the book's wishes say. Its own thread, but for the public methods.

    Args:
        say: tells people what is loaded and unloaded.

    Attributes:
        patience: seconds after which a load that does not move is taken to hang; 0: it is waited for.
    """

    def __init__(
        self,
        settings: Settings,
        book: ModelRegistry,
        names: NameResolver,
        engine: EngineThread,
        builder: ModelBuilder,
        clients: Clients,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._book, self._names = settings, book, names
        self._engine, self._builder = engine, builder
        self._clients, self._say = clients, say
        self.stopping = False
        self.patience = settings.generation_watchdog_seconds
        self._moved: float | None = None  # when something was read or computed last; None: nothing is loaded now
        self._busy_with = ""
        book.stuck = self._stuck
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits a while for the thread's end. May be called twice."""
        self.stopping = True
        self._book.wishes.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _stuck(self) -> StartLLMError | None:
        limit, moved = self.patience, self._moved
        if not limit or moved is None or time.monotonic() - moved < limit:
            return None
        return Unavailable(
            f"{self._busy_with} is being loaded or unloaded, and nothing of it has moved for {limit:g} s "
            "(GENERATION_WATCHDOG_SECONDS); until that ends no other model can be loaded.",
            retry_after=limit,
        )

    def _move(self) -> None:
        self._moved = time.monotonic()

    def serve(self, entry: PoolEntry, built: Built) -> ActiveModel:
        """Any thread. Raises NotSupported if the model cannot be served."""

        def anchor(guess: Any, session: str) -> None:
            self._engine.anchor(guess, session, entry.key)

        base = entry.known.base if entry.known is not None and entry.known.adapter is not None else None
        return serve(entry.settings, self._clients, built, entry.key, int(time.time()), anchor, base)

    # --- its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        while True:
            entry = None
            try:
                entry = self._book.wishes.get(timeout=LOOK_SECONDS)
            except Empty:
                self._try("looking for models that nobody uses", self._look)
                continue
            finally:
                self._try("ending waits", self._book.end_waits)
            if entry is None or self.stopping:
                return
            self._busy_with = entry.name
            self._move()
            try:
                if entry.state == "loading":
                    self._load(entry)
                elif entry.state == "unloading":
                    self._unload(entry)
            except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next wish; logged there
                self._failed(entry, error)
            self._moved = None

    def _look(self) -> None:
        self._book.send_old_away(self._settings.model_ttl_seconds)
        self._book.look_again()

    def _load(self, entry: PoolEntry) -> None:
        preloaded = self._names.is_preloaded(entry.name)  # may look at the disk, which may hang
        with self._book.lock:
            if not entry.waiting and entry.users == 0 and not preloaded:
                self._book.no_longer_short(entry)
                entry.state = "stored"  # whoever wanted it has gone
                return
        began = time.monotonic()
        loaded = False
        try:
            # If the last model with these weights goes to make room, they stay for this one.
            shared = self._builder.bases.find(entry.weights.group)
            if self._room(entry) is None:
                return
            ahead = self._look_at(entry)
            if not self._make_room(entry):
                return
            if entry.task is not None:
                self._bring_audio_in(entry)
            else:
                self._bring_in(entry, ahead)
            del shared
            loaded = True
        except BaseException as error:  # noqa: BLE001 - a model's own code may do anything; its requests are told
            self._failed(entry, error)
        if not loaded:
            gc.collect()
            return
        self._tell(f"loaded    {entry.name}  ({time.monotonic() - began:.1f} s)")

    def _room(self, entry: PoolEntry) -> list[str] | None:
        """Keys of the models that have to go for it; ``None``: it waits for them to be idle. Raises OutOfMemory."""
        limits = PoolLimits(self._builder.usable, self._settings.max_loaded_models)
        with self._book.lock:
            residents, running, short = self._book.residents(), self._builder.running, self._book.short
            try:
                going = room_for(entry.resident, residents, limits, running)
            except OutOfMemory as error:
                if not there_will_be_room(entry.resident, residents, limits):
                    raise
                self._book.wait_for_room(entry, error)
                return None
            if going and short and short[0] is not entry:
                behind = (
                    f"{entry.name} waits for memory behind {short[0].name}, which others at work are in the way of."
                )
                self._book.wait_for_room(entry, OutOfMemory(behind))
                return None
            return going

    def _look_at(self, entry: PoolEntry) -> PreloadedFiles | None:
        """What is read before others go for it. Raises NotFound and the like if it cannot be loaded anyway.

        Returns:
            ``None``: it is an audio model.
        """
        if entry.task is not None:
            check_installed()
            return None
        known = entry.known
        folder = self._names.main_folder() if known is None else known.stored.folder
        try:
            check_source(str(folder), command="", trust_code=entry.settings.trust_remote_code)
        except CheckpointError as error:
            kind = NotSupported if folder.is_dir() else NotFound
            raise kind(f"{entry.name} cannot be loaded: {str(error).partition(': ')[2] or error}") from error
        eos = read_config(folder).get("eos_token_id")
        return self._builder.read(entry.settings, folder, eos, None if known is None else known.adapter)

    def _make_room(self, entry: PoolEntry) -> bool:
        """False: it has to wait after all. Raises OutOfMemory."""
        with self._book.lock:
            going = self._room(entry)
            if going is None:
                return False
            self._book.no_longer_short(entry)
            taken = self._book.take(going)
        for other in taken:
            self._unload(other)
        return True

    def _bring_in(self, entry: PoolEntry, ahead: PreloadedFiles | None) -> None:
        if ahead is not None:
            self._builder.read_weights(ahead.folder, self._move)
        built: list[Built] = []
        steps = self._builder.steps(entry.settings, entry.key, entry.weights, built.append, ahead)
        self._engine.load(entry.key, self._moving(steps))
        serving = None
        try:
            serving = self.serve(entry, built[0])
            if entry.known is None:
                self._names.began(serving.served.name, serving.served.source, built[0].loaded.folder)
            self._book.ready(entry, serving)
        except BaseException:
            self._take_out(entry, serving)
            raise

    def _bring_audio_in(self, entry: PoolEntry) -> None:
        assert entry.known is not None
        library = hearing if entry.task == "transcription" else speaking
        library.import_library()
        steps: Generator[float, None, Any] = library.loading(entry.known.stored.folder, entry.name)
        steps = self._builder.guest(entry.key, entry.weights, steps)
        made = [self._engine.guest(self._moving(steps))]
        try:
            self._book.ready_to_hear(entry, made[0])
        except BaseException:
            self._try(entry.name, lambda: self._engine.guest(self._builder.guest_leaves(entry.key, made)))
            raise

    def _moving[T](self, steps: Generator[float, None, T]) -> Generator[float, None, T]:
        """The steps, on the model thread, of which each is a sign of life."""
        try:
            while True:
                self._move()
                try:
                    pause = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                yield pause
        finally:
            steps.close()

    def _failed(self, entry: PoolEntry, error: BaseException) -> None:
        if not isinstance(error, StartLLMError):
            log.warning("%s could not be loaded", entry.name, exc_info=error)
            error = Internal(f"{entry.name} could not be loaded: {type(error).__name__}: {error}")
        error = error.again()  # its traceback holds what was loaded of the model
        if not isinstance(error, BadRequest | OutOfMemory | Unavailable):  # a faulty adapter is the client's own matter
            error.refusal = NOT_LOADABLE
        with self._book.lock:
            entry.state, entry.serving, entry.audio = "stored", None, None
            self._book.no_longer_short(entry)
            if not isinstance(error, OutOfMemory | Unavailable):  # there may be room at any time
                entry.failure, entry.failed = error, time.monotonic()
            self._book.give_up(entry, error)
        if not self.stopping:
            self._tell(f"not loaded {error.message}")

    def _unload(self, entry: PoolEntry) -> None:
        """Its state says so already, and nobody holds it. Who asks for it meanwhile gets it back afterwards."""
        with self._book.lock:
            serving, entry.serving = entry.serving, None
            audio, entry.audio = [entry.audio], None
        if serving is not None:
            self._take_out(entry, serving)
        elif audio[0] is not None:
            self._try(entry.name, lambda: self._engine.guest(self._builder.guest_leaves(entry.key, audio)))
        held = [weakref.ref(serving.built.loaded.model)] if serving is not None else []
        del serving
        audio.clear()
        _give_back(entry.name, held)
        with self._book.lock:
            entry.state = "stored"
            if entry.waiting:
                self._book.wish_for(entry)
            self._book.look_again()
        self._tell(f"unloaded  {entry.name}")

    def _take_out(self, entry: PoolEntry, serving: ActiveModel | None) -> None:
        """What fails here is logged: the model is gone all the same, and may be loaded anew.

        Args:
            serving: ``None`` if it came to none.
        """
        steps: list[Callable[[], object]] = [lambda: self._engine.unload(entry.key)]
        if serving is not None:
            served = serving.served
            steps = [served.recorder.close, *steps, served.pipeline.close, lambda: self._count(served)]
        self._try(f"unloading {entry.name}", *steps)

    def _count(self, served: ModelHandle) -> None:
        with self._book.lock:
            self._book.gone.update(served.pipeline.counters())

    def _try(self, what: str, *steps: Callable[[], object]) -> None:
        """What fails is logged, and what comes after it is done all the same."""
        for step in steps:
            try:
                step()
            except Exception:
                log.warning("%s: a step failed", what, exc_info=True)

    def _tell(self, line: str) -> None:
        """People are told if they can be: nothing depends on it."""
        self._try(line, lambda: self._say(line))


def _give_back(name: str, held: list[weakref.ref[Any]]) -> None:
    """Weights and KV, before another model takes their place.

    A model points at itself in places, so the collector has to find it; and the thread that writes the end of its last
    answer may hold it for a moment longer. While the collector looks, no other thread does anything: not too often.

    Args:
        held: its weights.
    """
    until = time.monotonic() + LINGER_SECONDS
    gc.collect()
    while any(each() is not None for each in held):
        if time.monotonic() > until:
            log.warning("%s was unloaded, but something still holds its weights", name)
            return
        time.sleep(COLLECT_SECONDS)
        gc.collect()
