"""What HTTP threads ask of the model thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.events import EngineEvent
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling

Sink = Callable[[EngineEvent], None]
"""Takes a work's events, as the `put` of a `queue.SimpleQueue` does. Called on the model thread; must not block."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for the generated text."""

    grammar: str  # llguidance grammar text (its serialised form)
    # token ids, in this order, after which the constraint starts, e.g. the end of reasoning; empty: at once.
    after: tuple[int, ...] = ()
    wait: bool = False  # generated text starts inside reasoning, so `after` must be seen first
    # tokens (any of them) with which the model may open reasoning as its first token; then `after` ends it
    opens: tuple[int, ...] = ()
    param: str = "response_format"  # the field of the request that asks for it
    # what the engine made of `grammar`, so that it need not do it again; ``None`` before that
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
    """Run this prompt. Events go to `sink`, the last one is `EngineDone` or `Failed`."""

    id: str  # unique among running work; a request with n choices submits n of them
    prompt: Prompt
    sampling: Sampling
    max_tokens: int  # at least 1
    sink: Sink = field(compare=False)
    logprobs: int | None = None  # ``None`` or the number of alternatives to report
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None
    session: str | None = None  # the conversation this belongs to, as far as it is known; unique for one `owner` only
    owner: str | None = None  # who asks, see `ChatRequest`
    one_shot: bool = False  # a side request (title, summary): its KV is the first to go
    # more tokens of this conversation that drafts may be taken from; called once, on any thread
    views: Callable[[], Sequence[Any]] | None = field(default=None, compare=False)
    model: str = ""  # which of the loaded models runs it; empty: the first


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot, swapped whole by the model thread."""

    state: str  # ``loading``, ``ready``, ``busy``, ``wedged``, ``failed`` or ``stopped``
    running: int = 0
    queued: int = 0
    beat: float = 0.0  # ``time.monotonic()`` of the last sign of life
    detail: str = ""  # a sentence, e.g. why it failed
    since: float | None = None  # unix time of the last move of a wedged model thread
    # totals and sizes by name, for `/metrics`; read-only, at most a second old
    figures: Mapping[str, float] = field(default_factory=dict)
