"""What a dialect is to the server: requests in, answers and streams out. It computes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from start_llm.api.common.collect import Collected
from start_llm.api.http import sse
from start_llm.api.http.routes import Reply, WrongMethod
from start_llm.core.errors import StartLLMError
from start_llm.core.events import Done, Event, Progress, Usage
from start_llm.core.protocol import error_body, error_headers, style_of
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest


class Task(ABC):
    """A validated request whose answer is computed in steps and sent as a whole.

    Args:
        request: as observers see it: its id, its kind and its model; no messages.
        work: computes; each part is a step. Raises StartLLMError.
    """

    def __init__(self, request: ChatRequest, work: Iterable[Progress]) -> None:
        self.request, self.work = request, work

    def steps(self) -> Generator[Event]:
        """Computes. The last event is `Done`. Raises StartLLMError. Closed when the client goes."""
        yield from self.work
        # The counts of a report are of KV that is reused or not; here there is none, and shares must not be thinned.
        yield Done(Usage(prompt=self.tokens(), completion=0, cached=0), CacheReport())

    def tokens(self) -> int:
        """That were read, when the steps are over."""
        return 0

    @abstractmethod
    def reply(self) -> Reply:
        """The answer, when the steps are over."""


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


class Exchange(ABC):
    """A validated request with the two ways to answer it."""

    request: ChatRequest

    @property
    def requests(self) -> tuple[ChatRequest, ...]:
        """What is run: `request`, and where a body has several prompts the others."""
        return (self.request,)

    @abstractmethod
    def body(self, result: Collected) -> dict[str, Any]:
        """The whole answer as JSON."""

    @abstractmethod
    def writer(self) -> StreamWriter: ...


def error_reply(error: StartLLMError, path: str) -> Reply:
    """The error in the dialect of `path`."""
    body, kind = error_body(error, style_of(path))
    headers = error_headers(error)
    if isinstance(error, WrongMethod):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Reply(sse.dumps(body), error.status, kind, headers)
