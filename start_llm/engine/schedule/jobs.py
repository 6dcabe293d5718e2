"""A request on the model thread: from waiting, through prefill, to decoding. Model thread only."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from start_llm.core.errors import StartLLMError
from start_llm.core.events import EngineDone, EngineEvent, Failed
from start_llm.core.report import CacheReport
from start_llm.core.work import Submit
from start_llm.engine.decode.draft import DecodeCounts
from start_llm.engine.decode.row import Cache
from start_llm.kvcache.blocks import as_tokens

EndReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class Followed:
    """A job in prefill that computes what another one needs, up to the token `until`.

    `stored`: tokens that were stored when the other one began to wait.
    """

    job: Job
    until: int
    stored: int

    @property
    def is_over(self) -> bool:
        """The KV is there, or will not come."""
        return not isinstance(self.job.state, Prefilling) or self.job.state.position >= self.until


@dataclass(slots=True)
class Waiting:
    """In the queue: new, or put back after it had run."""


@dataclass(slots=True)
class Prefilling:
    """Its tokens are computed, or it waits for a job that computes the same ones."""

    cache: Cache | None = None  # holds the first `position` tokens; ``None``: nothing is restored yet
    position: int = 0
    stops: list[int] = field(default_factory=list)  # offsets at which prefill stops to store KV, ascending
    follows: Followed | None = None  # the job whose KV this one waits for


@dataclass(slots=True)
class Decoding:
    """A row of the runner, which has its KV."""

    uid: int
    states: list[tuple[int, Cache]]  # of its answer, see `RowState`


@dataclass(slots=True)
class Ended:
    """Its final event is out."""


@dataclass(slots=True, eq=False)
class Job:
    """One `Submit`. What is true in one stage only is in `state`."""

    work: Submit
    tokens: np.ndarray  # what prefill has to cover: the prompt, and after a pause what was generated before it; int32
    submitted: float  # seconds of the scheduler's clock, as all times here
    state: Waiting | Prefilling | Decoding | Ended = field(default_factory=Waiting)
    lent: Cache | None = None  # the caches that the store takes back when the job runs no more
    generated: list[int] = field(default_factory=list)
    report: CacheReport = field(default_factory=CacheReport)  # about the first admission
    computed: int = 0  # prompt tokens that went through the model before the first token of the answer
    admitted: float = 0.0
    watched: float | None = None  # clock reading from which the watchdog counts, ``None`` while it does not
    counted: float = 0.0  # seconds that the watchdog has counted before that
    counts: DecodeCounts = field(default_factory=DecodeCounts)  # what decoding it took
    failures: int = 0  # steps that failed outside of any request's own work while this one ran
    alone: bool = False  # it decodes by itself, because it may be what made a step of several rows fail
    urgent: bool = False  # a small question: see `urgent`
    idle: bool = False  # work for an idle gap: it has no client and yields to everyone
    cancelled: bool = False
    drawing: Any = None  # a `TextDrawing`: how its tokens are drawn, once it is admitted
    pending: int | None = None  # a token that `drawing` has drawn before a pause and that is not reported yet
    allowed: float = math.inf  # tokens that memory allows it to generate in all

    @property
    def prefill(self) -> Prefilling:
        """Its state, where it is in prefill."""
        assert isinstance(self.state, Prefilling)
        return self.state

    @property
    def is_new(self) -> bool:
        """In prefill it has computed nothing yet that is not stored."""
        return self.prefill.position <= self.report.reused

    @property
    def prefix(self) -> int:
        """Tokens that prefill covers: the last one is fed by the first decode step, if it is the newest there is."""
        return len(self.tokens) - (self.pending is None and not self.idle)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.work.prompt.tokens) + len(self.generated)

    @property
    def left(self) -> int:
        """Tokens that it may still generate, at least one."""
        return max(1, int(min(self.work.max_tokens, self.allowed)) - len(self.generated))

    def seconds(self, now: float) -> float:
        """What the watchdog has counted so far."""
        return self.counted + (0.0 if self.watched is None else now - self.watched)

    def pause(self, now: float, pending: int | None = None) -> None:
        """Back to waiting, without KV; it will go on behind what it has generated.

        `pending`: of a row that was suspended. Without it a row that decoded draws its next token again.
        """
        if isinstance(self.state, Decoding):
            self.counted = self.seconds(now)
            self.pending = pending
        self.watched = None
        if self.generated:
            self.tokens = as_tokens((*self.work.prompt.tokens, *self.generated))
        self.state = Waiting()
        if self.pending is None:
            self.drawing = None

    def prefilled(self, tokens: int) -> None:
        """So many tokens more went through the model. Behind a pause in an answer they are no work of the prompt's."""
        self.prefill.position += tokens
        if not self.generated and self.pending is None:
            self.computed += tokens

    def final_report(self) -> CacheReport:
        """Counts of the work that was done, not of what was planned."""
        return replace(
            self.report,
            prompt=len(self.work.prompt.tokens),
            # The first decode step computes the prompt's last token.
            computed=self.computed + bool(self.generated),
            generated=len(self.generated),
            **asdict(self.counts),
        )

    def send(self, event: EngineEvent) -> None:
        if not isinstance(self.state, Ended):
            self.work.sink(event)

    def end(self, reason: EndReason) -> None:
        """Sends the final event; later calls do nothing."""
        self.send(EngineDone(reason, tuple(self.generated), self.final_report()))
        self.state = Ended()

    def fail(self, error: StartLLMError) -> None:
        self.send(Failed(error, self.final_report()))
        self.state = Ended()
