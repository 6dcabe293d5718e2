"""What the HTTP edge may ask for. `chat` implements it; tests fake it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from start_llm.core.events import Event
from start_llm.core.report import Background, CacheReport, StoredTree
from start_llm.core.request import ChatRequest


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    id: str
    created: int  # unix seconds
    context: int  # most tokens of a request, answer included
    owned_by: str = "start_llm"
    # `tools`, `reasoning`, `vision`: whether it takes tools, can think before it answers, sees images
    tools: bool = True
    reasoning: bool = True
    vision: bool = False
    # what becomes of an image: ``shown`` to the model, told as a ``placeholder``, or ``reject``ed
    images: Literal["shown", "placeholder", "reject"] = "placeholder"
    # ``ready``, ``loading``, ``unloading``, ``failed``, or ``stored``: it lies on disk and is loaded when it is
    # asked for
    state: Literal["ready", "loading", "unloading", "failed", "stored"] = "ready"
    pinned: bool = False  # it is not unloaded for another one
    weight_bytes: int = 0  # of its parameters. `kv_bytes`: of its KV in memory
    kv_bytes: int = 0
    problem: str = ""  # why it cannot be loaded now
    context_scale: float = 1.0  # by which counts that clients of the Anthropic API are told are multiplied
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> dict[str, Any]:
        return {"tools": self.tools, "reasoning": self.reasoning, "vision": self.vision, "images": self.images}

    @property
    def family(self) -> str:
        return str(((self.details.get("facts") or {}).get("family") or {}).get("value") or "generic")


@dataclass(frozen=True, slots=True)
class Health:
    """`ok` is what decides between 200 and 503; `since` is when a wedged model last moved, in ISO 8601 (UTC).

    `capabilities`: of the served model, as in its card; empty until it is loaded.
    """

    ok: bool
    state: str
    running: int = 0
    queued: int = 0
    detail: str = ""
    since: str | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)


class EventStream(Protocol):
    """An iterator over a request's events that must be closed; closing early cancels the work.

    Iteration yields a `Progress` at least every `SSE_PING_SECONDS` while nothing else happens, so that a writer can
    show life and notice a client that has gone.

    `close` may be called from any thread, also while another one waits in `__next__`, which then ends with
    `StopIteration` at once; calling it again, or after the end, does nothing.
    """

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event: ...

    def close(self) -> None: ...

    def last_report(self, patience: float) -> CacheReport | None:
        """What a request that ended early has cost; ``None`` if nothing is known. To be asked when it is closed.

        Waits for the model thread's last word, `patience` seconds at most: it may be within a chunk.
        """


class ModelList(Protocol):
    """The models that there are, loaded or not. Any thread."""

    def cards(self) -> tuple[ModelCard, ...]:
        """All that may be asked for; first the one that the server was started with."""

    def card(self, name: str) -> ModelCard:
        """Raises NotFound."""

    def load(self, name: str) -> ModelCard:
        """Returns when it is loaded. Raises NotFound, OutOfMemory, or why it cannot be loaded."""

    def unload(self, name: str) -> ModelCard:
        """Returns when its KV is on disk and its memory is free. Raises NotFound; Conflict if a request uses it."""

    def pin(self, name: str, pinned: bool) -> ModelCard:
        """A pinned model is not unloaded for another one. Raises NotFound."""

    def served_name(self, asked: str) -> str:
        """The name of the model that answers who asks for `asked`; `asked` itself where none does."""

    def token_text(self, token: int, model: str = "") -> str:
        """A token's text, for logprobs, in the vocabulary of the model of that name."""


class Service(Protocol):
    """Thread-safe; called on HTTP threads."""

    @property
    def models(self) -> ModelList: ...

    def chat(self, request: ChatRequest) -> EventStream:
        """Validates against the model and submits. Raises StartLLMError before any event."""

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would make."""

    def explain(self, request: ChatRequest) -> CacheReport:
        """What the request would reuse and compute; nothing is run."""

    def cache_report(self, request_id: str) -> CacheReport | None:
        """The report of a recent request."""

    def background(self, request_id: str) -> Background:
        """What is known of a recent request beside its report."""

    def stored(self) -> StoredTree:
        """All KV that is stored, for people. Raises Unavailable, TimeoutError."""

    def health(self) -> Health: ...
