"""The whole server in this process but for the models' steps: the engine says what the test tells it to say."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm import app as wiring
from start_llm.api.handler import Edge, RequestHandler
from start_llm.api.http.routes import Feed, Reply
from start_llm.api.http.wire import Head, Headers
from start_llm.app import App
from start_llm.core.errors import StartLLMError, Unavailable
from start_llm.core.events import EngineDone, Sampled, Started, TokenLogprob
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport, StoredTree
from start_llm.core.settings import load_settings
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.schedule.prefill import planned
from start_llm.models.pull import PullError
from tests.fuzz.bodies import LAST
from tests.fuzz.requests import Request
from tests.integration.live import places

WAIT = 120.0
_RESPONSE = re.compile(rb'"id":\s*"(resp_[0-9a-f]+)"')


class ScriptedEngine:
    """Implements what `App` and its pool ask of `EngineThread`. Models are really loaded, unloaded and looked at, on a
    thread of their own, and never run: answers are made by `submit`.
    """

    def __init__(self, **options: Any) -> None:
        self._at_end = options["at_end"]
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main)
        self._runtimes: dict[str, Any] = {}
        self.answer: tuple[int, ...] = ()

    def _main(self) -> None:
        """What MLX makes and clears belongs to a thread: this one, not the one that runs the tests."""
        while (task := self._tasks.get()) is not None:
            task()
        for runtime in self._runtimes.values():
            runtime.close()
        self._at_end()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *args: Any, **options: Any) -> bool:
        self._tasks.put(None)
        self._thread.join()
        return True

    def chore(self, steps: Generator[float, None, Any]) -> Any:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                while True:
                    time.sleep(next(steps))
            except StopIteration as end:
                answer.set_result(end.value)
            except BaseException as error:  # noqa: BLE001 - raised where it was asked for
                answer.set_exception(error)

        self._tasks.put(run)
        return answer.result(WAIT)

    guest = chore

    def load(self, model: str, steps: Generator[float, None, Any]) -> Any:
        runtime = self._runtimes[model] = self.chore(steps)
        return runtime

    def unload(self, model: str) -> None:
        self.chore(self._runtimes.pop(model).unloading())

    def submit(self, work: Submit) -> None:
        runtime = self._runtime(work.model)
        if work.constraint is not None:
            runtime.grammars.processor(work.constraint)
        report = CacheReport(prompt=len(work.prompt.tokens), computed=len(work.prompt.tokens))
        work.sink(Started(report))
        tokens = self.answer[: work.max_tokens]
        top = None if work.logprobs is None else ((1, -1.0), (2, -2.0))[: work.logprobs]
        for token in tokens:
            work.sink(Sampled(token, None if top is None else TokenLogprob(token, -0.5, top)))
        work.sink(EngineDone("length" if len(tokens) == work.max_tokens else "stop", tokens, report))

    def cancel(self, work_id: str) -> None:
        """Nothing runs on."""

    def plan(self, prompt: Prompt, model: str = "") -> CacheReport:
        return planned(self._runtime(model).scheduler.store, prompt.tokens)

    def stored(self, model: str = "") -> StoredTree:
        found: StoredTree = self._runtime(model).scheduler.store.unguarded.snapshot()
        return found

    def prefill_idle(self, prompt: Prompt, *whose: str | None, model: str = "") -> None:
        """Nothing is computed."""

    def watched(self) -> float:
        return 0.0

    def status(self) -> EngineStatus:
        return EngineStatus("ready", beat=time.monotonic())

    def _runtime(self, model: str) -> Any:
        found = self._runtimes.get(model)
        if found is None:
            raise Unavailable(f"The model {model!r} is not loaded.")
        return found


class Wire(RequestHandler):
    """Keeps what would go to the client."""

    def __init__(self, connection: socket.socket, request: Any, edge: Edge) -> None:
        reader = SimpleNamespace(keeps_alive=True)
        super().__init__(SimpleNamespace(socket=connection, reader=reader), request, edge)  # type: ignore[arg-type]
        self.status = 0
        self.sent = b""

    def reply(self, reply: Reply) -> None:
        self.status, self.sent = reply.status, reply.body

    def open_stream(self, headers: Mapping[str, str]) -> None:
        self.status = 200

    def write(self, data: bytes) -> None:
        self.sent += data


class Noise(logging.Handler):
    """What nobody should find in the log: errors, and tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(f"{record.name}: {record.getMessage()}")


@dataclass
class World:
    """
    Attributes:
        last: the id of the last response that was answered.
        known: the tokens of what was said already.
    """

    app: App
    noise: Noise
    connection: socket.socket
    tokenizer: Any
    last: str = "resp_none"
    known: dict[str, list[int]] = field(default_factory=dict)

    def say(self, pieces: Iterable[str]) -> None:
        """What the model is going to answer."""
        tokens = [token for piece in pieces for token in self._tokens(piece)]
        self.app.engine.answer = tuple(tokens)  # type: ignore[attr-defined]

    def _tokens(self, piece: str) -> list[int]:
        if piece not in self.known:
            self.known[piece] = self.tokenizer.encode(piece, add_special_tokens=False)
        return self.known[piece]

    def ask(self, request: Request) -> tuple[int, bytes]:
        """Status and what was sent. Exceptions that the server's edge would call unexpected are raised."""
        path, body = request.path.replace(LAST, self.last), request.body.replace(LAST.encode(), self.last.encode())
        headers = Headers(request.headers.items())
        head = Head(request.method, path, path.rstrip("/") or "/", headers, len(body), keep_alive=True, expects=False)
        wire = Wire(self.connection, request._replace(headers=headers), self.app._server._edge)
        try:
            admitted = self.app._server.admit(head, request.peer)
            assert admitted.handler is not None
            answer = admitted.handler(replace(admitted, body=body, received=time.monotonic()))
            assert not isinstance(answer, Feed), "a feed has no end"
            wire.write_answer(answer)
        except StartLLMError as error:
            wire.status, wire.sent = error.status, wire.sent or error.message.encode("utf-8", "replace")
        found = _RESPONSE.search(wire.sent)
        self.last = found[1].decode() if found is not None else self.last
        return wire.status, wire.sent


def _fetch(name: str, *args: Any, **options: Any) -> None:
    raise PullError(f"{name}: nothing is fetched by tests.")


@contextmanager
def world(model: Path, cache: Path, **settings: Any) -> Iterator[World]:
    defaults = places(model, cache) | {"enable_request_logging": False, "kv_disk_dir": "off"}
    here, there = socket.socketpair()
    noise = Noise()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "EngineThread", ScriptedEngine)
        app = App(load_settings(None, **(defaults | settings)), say=lambda line: None)
    app._server.page.pulls._fetch = _fetch
    logging.getLogger("start_llm").addHandler(noise)
    app.start()
    runtime = app.pool.main_runtime
    assert runtime is not None
    try:
        yield World(app, noise, here, runtime.loaded.tokenizer)
    finally:
        app.stop()
        logging.getLogger("start_llm").removeHandler(noise)
        here.close()
        there.close()
