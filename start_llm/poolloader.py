"""The loader's thread: brings models in and out, one at a time.

It reads what needs no MLX, asks the model thread for the rest in steps, and decides (`models.pool`) who has to go for
whom.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Generator
from queue import Empty
from typing import Any

from start_llm.building import Built, ModelBuilder
from start_llm.core.errors import NOT_LOADABLE, Internal, NotSupported, OutOfMemory, StartLLMError, Unavailable
from start_llm.core.settings import Settings
from start_llm.engine import hearing, speaking
from start_llm.engine.sound import is_installed
from start_llm.engine.thread import EngineThread
from start_llm.models.capabilities import read_config
from start_llm.models.pool import Limits, room_for
from start_llm.poolbook import Book, Entry
from start_llm.poolnames import PoolNames
from start_llm.prompt.clients import Clients
from start_llm.serving import Serving, serve

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
NOT_INSTALLED = (
    "Speech is an extra that is not installed. In the folder of the clone (uv tool install takes the same words): "
    "pip install '.[audio]' -c constraints.txt"
)


class Loader:
    """Does what the book's wishes say. Its own thread, but for the public methods.

    Args:
        say: tells people what is loaded and unloaded.
    """

    def __init__(
        self,
        settings: Settings,
        book: Book,
        names: PoolNames,
        engine: EngineThread,
        builder: ModelBuilder,
        clients: Clients,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._book, self._names = settings, book, names
        self._engine, self._builder = engine, builder
        self._clients, self._say = clients, say
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits a while for the thread's end. May be called twice."""
        self.stopping = True
        self._book.wishes.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def serve(self, entry: Entry, built: Built) -> Serving:
        """Any thread. Raises NotSupported if the model cannot be served."""

        def anchor(guess: Any, session: str) -> None:
            self._engine.anchor(guess, session, entry.key)

        return serve(entry.settings, self._clients, built, entry.key, int(time.time()), anchor)

    # --- its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                entry = self._book.wishes.get(timeout=LOOK_SECONDS)
            except Empty:
                self._book.send_old_away(self._settings.model_ttl_seconds)
                continue
            if entry is None or self.stopping:
                return
            try:
                if entry.state == "loading":
                    self._load(entry)
                elif entry.state == "unloading":
                    self._unload(entry)
            except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next wish; logged there
                self._failed(entry, error)

    def _load(self, entry: Entry) -> None:
        with self._book.lock:
            if not entry.waiting and entry.users == 0 and not self._names.is_preloaded(entry.name):
                entry.state = "stored"  # whoever wanted it has gone
                return
        began = time.monotonic()
        serving = None
        try:
            self._make_room(entry)
            if entry.task is not None:
                self._bring_audio_in(entry)
            else:
                serving = self._bring_in(entry)
        except BaseException as error:  # noqa: BLE001 - a model's own code may do anything; its requests are told
            self._failed(entry, error)
        if serving is not None:
            self._book.ready(entry, serving)
        elif entry.audio is None:
            _free()
            return
        self._say(f"loaded    {entry.name}  ({time.monotonic() - began:.1f} s)")

    def _make_room(self, entry: Entry) -> None:
        """Raises OutOfMemory."""
        limits = Limits(self._builder.usable, self._settings.max_loaded_models)
        with self._book.lock:
            residents, running = self._book.residents(), self._builder.running
            going = self._book.take(room_for(entry.name, entry.weights, residents, limits, running))
        for other in going:
            self._unload(other)

    def _bring_in(self, entry: Entry) -> Serving:
        ahead, folder = None, None if entry.known is None else entry.known.stored.folder
        if folder is not None:
            ahead = self._builder.read(entry.settings, folder, read_config(folder).get("eos_token_id"))
        built: list[Built] = []
        steps = self._builder.steps(entry.settings, entry.key, entry.weights, built.append, ahead)
        self._engine.load(entry.key, steps)
        try:
            return self.serve(entry, built[0])
        except BaseException:
            self._engine.unload(entry.key)
            raise

    def _bring_audio_in(self, entry: Entry) -> None:
        if not is_installed():
            raise NotSupported(NOT_INSTALLED, code="extra_not_installed")
        assert entry.known is not None
        library = hearing if entry.task == "transcription" else speaking
        library.import_library()
        steps: Generator[float, None, Any] = library.loading(entry.known.stored.folder, entry.name)
        steps = self._builder.guest(entry.key, entry.weights, steps)
        self._book.ready_to_hear(entry, self._engine.chore(steps))

    def _failed(self, entry: Entry, error: BaseException) -> None:
        if not isinstance(error, StartLLMError):
            log.warning("%s could not be loaded", entry.name, exc_info=error)
            error = Internal(f"{entry.name} could not be loaded: {type(error).__name__}: {error}")
        error = error.again()  # its traceback holds what was loaded of the model
        if not isinstance(error, OutOfMemory | Unavailable):
            error.refusal = NOT_LOADABLE
        with self._book.lock:
            entry.state = "stored"
            if not isinstance(error, OutOfMemory | Unavailable):  # there may be room at any time
                entry.failure, entry.failed = error, time.monotonic()
            self._book.give_up(entry, error)
        if not self.stopping:
            self._say(f"not loaded {error.message}")

    def _unload(self, entry: Entry) -> None:
        """Its state says so already, and nobody holds it. Who asks for it meanwhile gets it back afterwards."""
        with self._book.lock:
            serving, entry.serving = entry.serving, None
            audio, entry.audio = [entry.audio], None
        if serving is not None:
            self._take_out(entry, serving)
        elif audio[0] is not None:
            self._engine.chore(self._builder.guest_leaves(entry.key, audio))
        del serving, audio
        _free()
        with self._book.lock:
            entry.state = "stored"
            if entry.waiting:
                self._book.wish_for(entry)
        self._say(f"unloaded  {entry.name}")

    def _take_out(self, entry: Entry, serving: Serving) -> None:
        """What fails here is logged: the model is gone all the same, and may be loaded anew."""
        served = serving.served
        for step in (served.recorder.close, lambda: self._engine.unload(entry.key), served.pipeline.close):
            try:
                step()
            except Exception:
                log.warning("unloading %s: a step failed", entry.name, exc_info=True)
        with self._book.lock:
            self._book.gone.update(served.pipeline.counters())


def _free() -> None:
    """Gives back what a model that has gone took, as far as something still points at itself."""
    gc.unfreeze()  # what was there at the start, too
    gc.collect()
