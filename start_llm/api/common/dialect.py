"""What a dialect is to the server: requests in, answers and streams out. It computes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from start_llm.api.common.collect import Collected
from start_llm.api.http.visitor import NOBODY, Visitor
from start_llm.core.errors import StartLLMError
from start_llm.core.events import Event
from start_llm.core.request import ChatRequest


@dataclass(frozen=True, slots=True)
class Inbound:
    """A request as it came in.

    Attributes:
        headers: case-insensitive.
        params: what the route's path holds, e.g. a response's id.
        received: ``time.monotonic()`` at arrival, in seconds.
        visitor: who may see again what is kept of it.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    params: tuple[str, ...] = ()
    received: float = 0.0
    visitor: Visitor = NOBODY


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class Task(ABC):
    """A validated request whose answer is computed in steps and sent as a whole.

    Attributes:
        request: as observers see it: its id, its kind and its model; no messages.
    """

    request: ChatRequest

    @abstractmethod
    def steps(self) -> Generator[Event]:
        """Computes; each event is a step. The last one is `Done`. Raises StartLLMError. Closed when the client goes."""

    @abstractmethod
    def reply(self) -> Reply:
        """The answer, when the steps are over."""


@dataclass(frozen=True, slots=True)
class Feed:
    """An answer without an end: server-sent events, until the client goes."""

    messages: Iterator[bytes]


class StreamWriter(Protocol):
    """Writes one request's events as server-sent events. Used by one thread, events in order."""

    def open(self) -> bytes:
        """What goes out before the first event."""
        ...

    def write(self, event: Event) -> bytes:
        """Any event but `Failed`; ``b""`` where the dialect says nothing."""
        ...

    def fail(self, error: StartLLMError) -> bytes:
        """The last bytes of a stream that failed after it was opened."""
        ...


class Exchange(Protocol):
    """A validated request with the two ways to answer it."""

    @property
    def request(self) -> ChatRequest: ...

    @property
    def requests(self) -> tuple[ChatRequest, ...]:
        """What is run: `request`, and where a body has several prompts the others."""
        ...

    def body(self, result: Collected) -> dict[str, Any]:
        """The whole answer as JSON."""
        ...

    def writer(self) -> StreamWriter: ...
