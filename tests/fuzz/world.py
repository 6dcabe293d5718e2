"""The whole server in this process but for the model: its engine says what the test tells it to say."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from start_llm import app as wiring
from start_llm.api.dialect import Inbound, Reply
from start_llm.app import App
from start_llm.core.errors import StartLLMError
from start_llm.core.events import Admitted, EngineDone, Sampled, TokenLogprob
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport
from start_llm.core.settings import load_settings
from start_llm.core.work import EngineStatus, Submit


class ScriptedEngine:
    """Implements what `App` asks of `EngineThread`. Loads the model and never runs it: answers are made by `submit`."""

    def __init__(self, load: Callable[[], Any], **options: Any) -> None:
        self._load, self._at_end = load, options["at_end"]
        self._loaded, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._main)
        self.answer: tuple[int, ...] = ()

    def _main(self) -> None:
        """What MLX makes and clears belongs to a thread: this one, not the one that runs the tests."""
        self._runtime = self._load()
        self._loaded.set()
        self._stopped.wait()
        self._runtime.close()
        self._at_end()

    def start(self) -> None:
        self._thread.start()

    def wait_loaded(self, timeout: float = 60.0) -> bool:
        return self._loaded.wait(timeout)

    def stop(self, *args: Any, **options: Any) -> None:
        self._stopped.set()
        self._thread.join()

    def submit(self, work: Submit) -> None:
        if work.constraint is not None:
            self._runtime.grammars.processor(work.constraint)
        report = CacheReport(prompt=len(work.prompt.tokens), computed=len(work.prompt.tokens))
        work.sink.put(Admitted(report))
        tokens = self.answer[: work.max_tokens]
        top = None if work.logprobs is None else ((1, -1.0), (2, -2.0))[: work.logprobs]
        for token in tokens:
            work.sink.put(Sampled(token, None if top is None else TokenLogprob(token, -0.5, top)))
        work.sink.put(EngineDone("length" if len(tokens) == work.max_tokens else "stop", tokens, report))

    def cancel(self, work_id: str) -> None:
        """Nothing runs on."""

    def plan(self, prompt: Prompt, model: str = "") -> CacheReport:
        return CacheReport(prompt=len(prompt.tokens), computed=len(prompt.tokens))

    def anchor(self, prompt: Prompt, session: str | None, model: str = "") -> None:
        """Nothing is computed."""

    def status(self) -> EngineStatus:
        return EngineStatus("ready", beat=time.monotonic())


class Wire:
    """Takes the place of a connection (`run.Out`)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.status = 0
        self.sent = b""

    def connection_socket(self) -> socket.socket:
        return self._connection

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
    app: App
    noise: Noise
    connection: socket.socket

    def say(self, text: str) -> None:
        """What the model is going to answer."""
        serving = self.app.pool.main_serving
        assert serving is not None
        tokenizer = serving.built.loaded.tokenizer
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.app.engine.answer = tuple(tokenizer.encode(clean, add_special_tokens=False))  # type: ignore[attr-defined]

    def ask(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and what was sent. Exceptions that the server's edge would call unexpected are raised."""
        edge = self.app._server._edge
        wire = Wire(self.connection)
        try:
            route, params = edge.routes.find(path)
            answer = edge.routes.handler(route, "POST", path)(
                Inbound("POST", path, headers or {}, body, params, time.monotonic())
            )
            if isinstance(answer, Reply):
                wire.reply(answer)
            else:
                edge.runner.run(answer, wire)
        except StartLLMError as error:
            wire.status, wire.sent = error.status, wire.sent or error.message.encode("utf-8", "replace")
        return wire.status, wire.sent


@contextmanager
def world(model: Path, cache: Path, **settings: Any) -> Iterator[World]:
    defaults: dict[str, Any] = {
        "model_path": str(model),
        "trust_remote_code": True,
        "start_llm_cache_dir": cache,
        "mlx_port": 0,
        "proxy": "off",
        "enable_request_logging": False,
        "kv_disk_dir": "off",
    }
    here, there = socket.socketpair()
    noise = Noise()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "EngineThread", ScriptedEngine)
        app = App(load_settings(None, **(defaults | settings)), say=lambda line: None)
    logging.getLogger("start_llm").addHandler(noise)
    app.start()
    try:
        yield World(app, noise, here)
    finally:
        app.stop()
        logging.getLogger("start_llm").removeHandler(noise)
        here.close()
        there.close()
