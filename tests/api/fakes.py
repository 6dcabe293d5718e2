"""A scripted service, and a server around it."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

from start_llm.api.anthropic.messages import read_messages
from start_llm.api.http.routes import Request
from start_llm.api.http.wire import Headers
from start_llm.api.ollama.chat import read_chat as read_ollama
from start_llm.api.openai.chat import read_chat, read_completion
from start_llm.api.openai.responses import read_responses
from start_llm.api.openai.responses_store import ResponsesStore
from start_llm.api.server import ApiServer
from start_llm.audio.service import AudioService
from start_llm.core.errors import NotFound, NotSupported
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from start_llm.core.report import Background, CacheReport, Miss, StoredTree
from start_llm.core.request import ChatRequest
from start_llm.core.service import Health, ModelCard
from start_llm.core.settings import Settings
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.request_log import RequestLog
from start_llm.embeddings.service import EncoderService

REPORT = CacheReport(prompt=120, reused=100, computed=20, new=16, generated=3, miss=Miss("diverged", token=100))
DONE = Done(Usage(prompt=120, completion=3, cached=100, reasoning=1), REPORT)
FIRST = Started(REPORT)


def answer(*events: Event, finish: str = "stop", stop_sequence: str | None = None) -> list[Event]:
    return [FIRST, *events, ChoiceDone(finish, 0, stop_sequence), DONE]  # type: ignore[arg-type]


TURN: list[Event] = [
    ReasoningDelta("think "),
    ReasoningDelta("hard"),
    TextDelta("I "),
    TextDelta("look."),
    ToolCallStarted(0, "call_a", "read"),
    ToolCallDelta(0, '{"path":'),
    ToolCallDelta(0, ' "x"}'),
    ToolCallFinished(0, "call_a", "read", '{"path": "x"}'),
    ToolCallStarted(1, "call_b", "list"),
    ToolCallFinished(1, "call_b", "list", ""),
]


class FakeStream:
    """Plays a list of events. A callable in it is called in its place; `close` ends a wait at once."""

    def __init__(self, events: Iterable[Any]) -> None:
        self._events = iter(events)
        self.closed = threading.Event()
        self.so_far: CacheReport | None = None

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self.closed.is_set():
            raise StopIteration
        event = next(self._events)
        if isinstance(event, Started):
            self.so_far = event.report
        if callable(event):
            event(self)
            return self.__next__()
        return event  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed.set()

    def last_report(self, patience: float) -> CacheReport | None:
        return self.so_far


def hold(stream: FakeStream) -> None:
    """Blocks until the stream is closed."""
    assert stream.closed.wait(120)  # longer than a test waits for it


def make_server(settings: Settings, service: Any, **parts: Any) -> ApiServer:
    """A server that is not started, without models that hear, speak or embed; `parts`: others than usual."""
    usual = {
        "metrics": Metrics(),
        "request_log": RequestLog(settings.log_root if settings.enable_request_logging else None),
        "observers": (),
        "encoders": EncoderService(settings, Mock(), Mock()),
        "audio": AudioService(settings, Mock(**{"audio_name.side_effect": NotSupported("It has none.")}), Mock()),
    }
    return ApiServer(settings, service, **(usual | parts))


class FakeService:
    """Answers with `script(request)`; keeps what it was asked."""

    def __init__(self, script: Callable[[ChatRequest], Iterable[Any]] | None = None) -> None:
        self.script = script or (lambda request: answer(TextDelta("Hello"), TextDelta(" there.")))
        self.requests: list[ChatRequest] = []
        self.streams: queue.SimpleQueue[FakeStream] = queue.SimpleQueue()
        self.ok = True
        self.scale = 1.0
        self.tree = StoredTree()
        self.acts: list[str] = []

    def chat(self, request: ChatRequest) -> FakeStream:
        self.requests.append(request)
        stream = FakeStream(self.script(request))
        self.streams.put(stream)
        return stream

    def count_tokens(self, request: ChatRequest) -> int:
        self.requests.append(request)
        return 42

    def explain(self, request: ChatRequest) -> CacheReport:
        self.requests.append(request)
        return REPORT

    def cache_report(self, request_id: str) -> CacheReport | None:
        return REPORT if request_id == "known" else None

    def background(self, request_id: str) -> Background:
        parted = Miss("diverged", 7, expected="words of somebody", found="words of the request", stored=(1, 2))
        return Background(("<update-1>", "System text, now:", "x", "</update-1>"), parted)

    def stored(self) -> StoredTree:
        return self.tree

    def token_text(self, token: int, model: str = "") -> str:
        return f"<{token}>"

    def load(self, name: str) -> ModelCard:
        self.acts.append(f"load {name}")
        return self._card(name)

    def unload(self, name: str) -> ModelCard:
        self.acts.append(f"unload {name}")
        return self._card(name)

    def pin(self, name: str, pinned: bool) -> ModelCard:
        return replace(self._card(name), pinned=pinned)

    def _card(self, name: str) -> ModelCard:
        if name != "tiny":
            raise NotFound(f"model={name!r}: this server serves 'tiny'.", param="model", code="model_not_found")
        return self.cards()[0]

    @property
    def models(self) -> FakeService:
        return self

    def cards(self) -> tuple[ModelCard, ...]:
        return (ModelCard("tiny", 1_700_000_000, 4096, context_scale=self.scale),)

    def card(self, name: str) -> ModelCard:
        return self.cards()[0]

    def served_name(self, asked: str) -> str:
        return "tiny" if asked in {"", "default", "claude-anything", "gpt-x/y"} else asked

    def health(self) -> Health:
        return Health(self.ok, "ready" if self.ok else "wedged", running=1, queued=2)


USER = [{"role": "user", "content": "Hi"}]
STORED = TemporaryDirectory()
READERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "chat": ({"messages": USER}, read_chat),
    "completions": ({"prompt": "Hi"}, read_completion),
    "messages": ({"messages": USER, "max_tokens": 9}, read_messages),
    "ollama": ({"messages": USER}, read_ollama),
    "responses": (
        {"input": "Hi"},
        lambda *given: read_responses(*given, ResponsesStore(Path(STORED.name) / "it").of("me")),
    ),
}
"""By dialect: the least body, and what reads it."""


def exchange(dialect: str, headers: Mapping[str, str] | None = None, /, **body: Any) -> Any:
    """What a server makes of the least body with these fields."""
    least, reader = READERS[dialect]
    raw = json.dumps({"model": "m"} | least | body).encode()
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    return reader(Request("POST", "/", Headers((headers or {}).items()), raw), settings, FakeService())


def read(dialect: str, headers: Mapping[str, str] | None = None, /, **body: Any) -> ChatRequest:
    return exchange(dialect, headers, **body).request  # type: ignore[no-any-return]
