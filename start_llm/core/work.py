"""What HTTP threads ask of the model thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from start_llm.core.events import EngineEvent
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling


class Sink(Protocol):
    """Where a work's events go; `queue.SimpleQueue` is one. Called on the model thread; must not block."""

    def put(self, event: EngineEvent, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for the generated text.

    Attributes:
        grammar: llguidance grammar text (its serialised form).
        after: token ids, in this order, after which the constraint starts, e.g. the end of reasoning; empty: at once.
        wait: generated text starts inside reasoning, so `after` must be seen first.
        opens: tokens (any of them) with which the model may open reasoning as its first token; then `after` ends it.
        param: the field of the request that asks for it.
        compiled: what the engine made of `grammar`, so that it need not do it again; ``None`` before that.
    """

    grammar: str
    after: tuple[int, ...] = ()
    wait: bool = False
    opens: tuple[int, ...] = ()
    param: str = "response_format"
    compiled: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Most reasoning tokens of an answer.

    `opens`, `closes`: token ids of the reasoning tags. `inside`: the prompt ends inside an open reasoning block.
    """

    tokens: int
    opens: int
    closes: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this prompt. Events go to `sink`, the last one is `EngineDone` or `Failed`.

    Attributes:
        id: unique among running work; a request with n choices submits n of them.
        max_tokens: at least 1.
        logprobs: ``None`` or the number of alternatives to report.
        session: the conversation this belongs to, as far as it is known.
        conversation: the same, where it is certain that nobody else's request can have it; see `ChatRequest`.
        views: more tokens of this conversation that drafts may be taken from; called once, on any thread.
        one_shot: a side request (title, summary): its KV is the first to go.
        model: which of the loaded models runs it; empty: the first.
    """

    id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    sink: Sink = field(compare=False)
    logprobs: int | None = None
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None
    session: str | None = None
    conversation: str | None = None
    one_shot: bool = False
    views: Callable[[], Sequence[Any]] | None = field(default=None, compare=False)
    model: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot, swapped whole by the model thread.

    Attributes:
        state: ``loading``, ``ready``, ``busy``, ``wedged``, ``failed`` or ``stopped``.
        beat: ``time.monotonic()`` of the last sign of life.
        detail: a sentence, e.g. why it failed.
        since: unix time of the last move of a wedged model thread.
        figures: totals and sizes by name, for `/metrics`; read-only, at most a second old.
    """

    state: str
    running: int = 0
    queued: int = 0
    beat: float = 0.0
    detail: str = ""
    since: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
