"""A loaded model as the request path needs it, and what holds it there while a request uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from start_llm.core.errors import Unavailable
from start_llm.core.messages import Message
from start_llm.core.request import ChatRequest
from start_llm.core.service import ModelCard, ModelList
from start_llm.core.work import Constraint
from start_llm.parsing.registry import OutputStyle
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.recorder import Recorder
from start_llm.prompt.tokenise import Eyes

WAIT_SECONDS = 600.0
"""What a request waits for its model at most, while it holds an HTTP thread. A stream of chat has no such limit."""


def still_loading(name: str) -> str:
    return f"The model {name!r} is still being loaded."


@dataclass(frozen=True)
class ModelHandle:
    """The loaded model as the request path needs it; immutable."""

    name: str  # what clients see
    context: int  # most tokens of a request, answer included
    pipeline: Pipeline
    recorder: Recorder
    style: OutputStyle
    detokenizer: Callable[[], Any]
    token_text: Callable[[int], str]
    check: Callable[[ChatRequest], None]  # raises BadRequest for what this model cannot do with a request's numbers
    # the grammar a request asks for, given whether its prompt ends inside reasoning
    constraint: Callable[[ChatRequest, bool], Constraint | None]
    eyes: Eyes | None = None  # of a model that is shown images; else a line of text stands for each of them
    # ids of the reasoning tags, where each is one token; else budgets are not enforced
    think_tokens: tuple[int, int] | None = None
    efforts: tuple[str, ...] = ()  # that it was trained with; empty: not known
    # other forms of a request's tool results, in tokens, that drafts may be taken from
    views: Callable[[Sequence[Message]], Sequence[Any]] | None = None
    model: str = ""  # its name for the model thread
    thinks: bool = True  # where a request does not say, and the model can
    sampling: Mapping[str, float] = field(default_factory=dict)  # what requests that say nothing of it are drawn with


class Lease[Handle](Protocol):
    """A request's hold on a model: it stays loaded, or is being loaded, until the lease is closed. Thread-safe."""

    def wait(self, seconds: float) -> bool:
        """True once the model is loaded, cannot be loaded, or the lease is closed; False: not within `seconds`."""

    @property
    def handle(self) -> Handle:
        """What the request may use. Raises StartLLMError: why the model could not be loaded."""

    def close(self) -> None:
        """May be called twice."""


@contextmanager
def loaded[Handle](lease: Lease[Handle], name: str) -> Iterator[Handle]:
    """The model, once it is loaded; the lease is closed at the end. Raises why it cannot be loaded, or Unavailable."""
    with closing(lease):
        if not lease.wait(WAIT_SECONDS):
            raise Unavailable(still_loading(name))
        yield lease.handle


class Models(ModelList, Protocol):
    """The list, with what requests hold of it. None of these waits for a model."""

    def open(self, name: str) -> Lease[ModelHandle]:
        """A hold on the model that `name` means; it is loaded if it is not.

        Raises NotFound, OutOfMemory, QueueFull, Unavailable, or what its last loading failed with, if not long ago.
        """

    def open_any(self, name: str) -> Lease[object]:
        """As `open`, of models of every kind: to have it loaded."""

    @property
    def main(self) -> ModelCard | None:
        """The main model, loaded or not; ``None`` before it was loaded once."""
