"""A server's service, audio models and encoder that refuse what a request names, each for one of its reasons."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from start_llm.core.errors import (
    NOT_LOADABLE,
    BadRequest,
    ContextLengthExceeded,
    Forbidden,
    Internal,
    NotFound,
    OutOfMemory,
    QueueFull,
    StartLLMError,
    Unavailable,
)
from start_llm.core.events import Failed, Progress, TextDelta
from start_llm.core.media import Computation, Encoded, Hints, Text
from start_llm.core.request import ChatRequest
from tests.api.fakes import FakeService, answer
from tests.api.media.test_audio import FakeAudio
from tests.api.media.test_embeddings import FakeEncoders

REASONS = ["queue_full", "out_of_memory", "context_length_exceeded", NOT_LOADABLE]


def error_of(word: str) -> StartLLMError:
    failed = Internal("small could not be loaded: ValueError: it is broken.")
    failed.refusal = NOT_LOADABLE
    errors: dict[str, StartLLMError] = {
        "queue_full": QueueFull("64 requests are running or waiting already.", retry_after=7),
        "out_of_memory": OutOfMemory("It needs 90.0 GB."),
        "context_length_exceeded": ContextLengthExceeded(prompt=9000, asked=1, limit=8192),
        NOT_LOADABLE: failed,
        "bad": BadRequest("temperature: too hot.", param="temperature"),
        "forbidden": Forbidden("No."),
        "unknown": NotFound("There is no such model.", param="model", code="model_not_found"),
        "internal": Internal("An unexpected error happened."),
        "unavailable": Unavailable("The server is shutting down."),
    }
    return errors[word]


class Scripted:
    """What the service does is the last word of the request; a word that is no error is answered.

    ``late WORD``: it is refused while it waits, when `go` is set.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.service = FakeService(self.events)

    def events(self, request: ChatRequest) -> Iterator[Any]:
        said = str(request.messages[-1].content if request.messages else request.prompt).split() or [""]
        try:
            error = error_of(said[-1])
        except KeyError:
            return iter(answer(TextDelta("From here.")))
        if said[0] != "late":
            raise error
        return self._late(error)

    def _late(self, error: StartLLMError) -> Iterator[Any]:
        while not self.go.wait(0.05):
            yield Progress(0, 0)
        yield Failed(error)


class Sounds(FakeAudio):
    """Refuses what a text or a prompt names; a text ``wait`` is never spoken to its end.

    Attributes:
        begun, left: somebody waits for it; nobody does any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.left = threading.Event(), threading.Event()

    def transcribe(self, model: str, file: bytes, hints: Hints) -> Computation[Any]:
        _refuse(hints.prompt)
        return super().transcribe(model, file, hints)

    def speak(self, model: str, text: str, form: str) -> Computation[Any]:
        _refuse(text)
        return self._endless() if text == "wait" else super().speak(model, text, form)

    def _endless(self) -> Computation[Any]:
        self.begun.set()
        try:
            while True:
                threading.Event().wait(0.02)
                yield Progress(0, 1)
        finally:
            self.left.set()


class Vectors(FakeEncoders):
    """Refuses what a text names."""

    def encode(self, texts: Sequence[Text], param: str, **how: Any) -> Computation[Encoded]:
        for text in texts:
            _refuse(str(text))
        return super().encode(texts, param, **how)


def _refuse(word: str) -> None:
    if word in REASONS:
        raise error_of(word)
