"""A request on the model thread: from waiting, through prefill, to decoding. Model thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

import numpy as np

from start_llm.core.errors import StartLLMError
from start_llm.core.events import EngineDone, EngineEvent, EngineFailed
from start_llm.core.report import CacheReport
from start_llm.core.work import Submit
from start_llm.engine.runner import Cache

EndReason = Literal["stop", "length", "cancelled", "deadline"]


class Stage(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Job:
    """Mutable state of one `Submit`.

    Attributes:
        tokens: the prompt as an int32 array, for fast comparison.
        position: prompt tokens in `cache` so far.
        pauses: offsets at which prefill stops to store KV, ascending.
        deadline: clock reading at which the watchdog ends it, or infinity.
        leader: the prefilling job whose KV this one waits for, up to `leader_until`;
            `stored` is what was stored when it began to wait.
        drawing: how its tokens are drawn, once it decodes.
        idle: a re-anchoring job: it has no client and yields to everyone.
    """

    work: Submit
    tokens: np.ndarray
    submitted: float
    deadline: float = float("inf")
    stage: Stage = Stage.WAITING
    position: int = 0
    pauses: list[int] = field(default_factory=list)
    cache: Cache | None = None
    uid: int = -1
    generated: list[int] = field(default_factory=list)
    report: CacheReport = field(default_factory=CacheReport)
    admitted: float = 0.0
    leader: Job | None = None
    leader_until: int = 0
    stored: int = 0
    idle: bool = False
    cancelled: bool = False
    drawing: Any = None

    @property
    def prefix(self) -> int:
        """Prompt tokens that prefill covers: the last one is fed by the first decode step."""
        return len(self.tokens) - 1

    @property
    def until(self) -> int:
        """Where prefill ends."""
        return len(self.tokens) if self.idle else self.prefix

    @property
    def most_tokens(self) -> int:
        """Tokens its KV may come to hold."""
        return len(self.tokens) + self.work.max_tokens

    def send(self, event: EngineEvent) -> None:
        if self.stage is not Stage.ENDED:
            self.work.sink.put(event)

    def end(self, reason: EndReason) -> None:
        """Sends the final event; later calls do nothing."""
        if self.stage is Stage.ENDED:
            return
        self.send(EngineDone(reason, tuple(self.generated), self.report))
        self.stage = Stage.ENDED

    def fail(self, error: StartLLMError) -> None:
        if self.stage is Stage.ENDED:
            return
        self.send(EngineFailed(error))
        self.stage = Stage.ENDED
