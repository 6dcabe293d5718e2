"""Which work the model does next. Model thread only; knows no MLX: effects go in as `Runner` and `GuardedStore`.

A step is: end what is cancelled or late, admit what fits, one decode step of
all rows, one prefill chunk of one request. Three collaborators do work of their own:
`prefill` (chunks and what is stored of them), `leaders` (prompts that share a beginning
nobody has computed yet) and `anchoring` (work for the idle gap).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from start_llm.core.errors import Internal, OutOfMemory, StartLLMError
from start_llm.core.events import Admitted, Prefilled, Sampled, TokenLogprob
from start_llm.core.report import CacheReport, Miss
from start_llm.core.work import Submit
from start_llm.engine.anchoring import Anchoring
from start_llm.engine.guarded import GuardedStore
from start_llm.engine.jobs import EndReason, Job, Stage
from start_llm.engine.leaders import Leaders
from start_llm.engine.memory import MemoryGuard
from start_llm.engine.prefill import Prefill
from start_llm.engine.runner import Row, Runner
from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.pieces import Plan

log = logging.getLogger(__name__)

Processors = list[Callable[[Any, Any], Any]]


class Drawing(Protocol):
    """How one request's tokens are drawn; holds state of its row (seed, grammar, penalties)."""

    sampler: Callable[[Any], Any]
    processors: Processors

    def logprob(self, token: int) -> TokenLogprob | None:
        """Of the row's next reported token, if the client asked; called once per token, in order.

        Raises what went wrong with the row's grammar: such a request ends with an error, never with garbage.
        """
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """`step`: prompt tokens a chunk; `idle_step`: the same while re-anchoring; `deadline`: seconds, 0 is none.

    `join`: a shared prefix shorter than this is computed again rather than waited for.
    """

    step: int
    idle_step: int = 128
    deadline: float = 0.0
    join: int = 64


class Scheduler:
    def __init__(
        self,
        runner: Runner,
        store: GuardedStore,
        draw: Callable[[Submit], Drawing],
        *,
        eos: frozenset[int],
        limits: Limits,
        max_concurrency: int,
        memory: MemoryGuard,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._store, self._draw = runner, store, draw
        self._eos, self._limits, self._clock = eos, limits, clock
        self._memory = memory
        self._room = min(max_concurrency, runner.max_rows)
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: dict[int, Job] = {}
        self._by_id: dict[str, Job] = {}
        self._turn = 0
        self._tokens_decoded = 0
        self._trim_misses = 0
        self._prefill = Prefill(runner, store, clock)
        self._leaders = Leaders(limits.join)
        self.anchoring = Anchoring(self._prefill, store, limits.idle_step, clock)

    # --- what the engine thread calls -------------------------------------

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, work: Submit) -> None:
        now = self._clock()
        deadline = now + self._limits.deadline if self._limits.deadline else float("inf")
        job = Job(work, as_tokens(work.prompt.tokens), submitted=now, deadline=deadline)
        self._by_id[work.id] = job
        self._waiting.append(job)

    def cancel(self, work_id: str) -> None:
        job = self._by_id.get(work_id)
        if job is not None:
            job.cancelled = True

    def step(self) -> None:
        self._reap()
        if self.busy:
            self.anchoring.end()
        self._admit()
        self._decode()
        self._prefill_step()

    def rest(self) -> None:
        """To be called now and then while there is nothing to do."""
        self._store.idle()

    def figures(self) -> dict[str, float]:
        """Totals of the work done and the store's sizes, by the names that `/metrics` shows."""
        return {
            "tokens_prefilled": self._prefill.tokens,
            "tokens_prefilled_idle": self.anchoring.tokens,
            "tokens_decoded": self._tokens_decoded,
            "hybrid_trim_miss": self._trim_misses,
            **self._store.figures(),
        }

    def plan(self, tokens: tuple[int, ...]) -> CacheReport:
        array = as_tokens(tokens)
        plan = self._store.lookup(array, limit=len(array) - 1)
        return _report(len(array), plan)

    def fail_all(self, error: StartLLMError) -> None:
        """Ends everything; nothing of what was running is stored."""
        for job in list(self._by_id.values()):
            self._memory.give(job.work.id)
            job.fail(error)
        for uid in list(self._decoding):
            self._runner.remove(uid)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._by_id.clear()
        self.anchoring.forget()

    # --- ending -------------------------------------------------------------

    def _reap(self) -> None:
        now = self._clock()
        for job in [j for j in self._by_id.values() if j.cancelled or now >= j.deadline]:
            self._abort(job, "cancelled" if job.cancelled else "deadline")

    def _abort(self, job: Job, reason: EndReason) -> None:
        """Ends a job early; the KV that is already computed is kept."""
        if job.stage is Stage.WAITING:
            self._waiting.remove(job)
        elif job.stage is Stage.PREFILL:
            self._prefilling.remove(job)
            if job.position > job.report.reused:
                self._prefill.keep(job)
        elif job.stage is Stage.DECODE:
            self._decoding.pop(job.uid, None)
            removed = self._runner.remove(job.uid)
            if removed is not None:
                cache, tokens = removed
                self._prefill.store(job, as_tokens(tokens), cache)
        self._end(job, reason)

    def _end(self, job: Job, reason: EndReason) -> None:
        job.report = replace(job.report, generated=len(job.generated))
        job.cache = None
        self._memory.give(job.work.id)
        self._by_id.pop(job.work.id, None)
        job.end(reason)

    @contextmanager
    def _failing(self, job: Job) -> Iterator[None]:
        """What goes wrong with one request ends that request only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged and sent to the client by _fail
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        log.warning("request %s failed: %s", job.work.id, error, exc_info=not isinstance(error, StartLLMError))
        self._memory.give(job.work.id)
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._prefilling:
            self._prefilling.remove(job)
        if self._decoding.pop(job.uid, None) is not None:
            self._runner.remove(job.uid)
        job.cache = None
        self._by_id.pop(job.work.id, None)
        job.fail(error if isinstance(error, StartLLMError) else _as_error(error))

    # --- admission ----------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self.running < self._room:
            job = self._waiting[0]
            with self._failing(job):
                if not self._memory.admits(job.most_tokens):
                    return
                self._waiting.popleft()
                self._memory.take(job.work.id, job.most_tokens)
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """Plans and restores, unless another job is computing more of this prompt than is stored."""
        plan = self._store.lookup(job.tokens, limit=job.prefix)
        job.stage, job.admitted = Stage.PREFILL, self._clock()
        self._prefilling.append(job)
        if not self._leaders.follow(job, plan.length, self._prefilling):
            self._restore(job, plan, joined=0)

    def _restore(self, job: Job, plan: Plan, joined: int) -> None:
        restored = self._store.restore(job.tokens, plan)
        self._trim_misses += plan.reason == "no_checkpoint"
        job.cache, job.position, job.leader = restored.cache, restored.length, None
        job.pauses = [p for p in self._store.pauses(job.work.prompt, job.position) if p < job.prefix]
        job.report = replace(
            _report(len(job.tokens), plan),
            reused=restored.length,
            computed=len(job.tokens) - restored.length,
            joined=max(0, min(joined, restored.length)),
            computed_idle=self.anchoring.share(job.tokens, restored.length),
            copied_bytes=restored.copied_bytes,
            seconds_queued=job.admitted - job.submitted,
        )
        job.send(Admitted(job.report))

    # --- decode ---------------------------------------------------------------

    def _decode(self) -> None:
        if not self._decoding:
            return
        for row in self._runner.decode():
            job = self._decoding.get(row.uid)
            if job is None:
                continue
            with self._failing(job):
                self._take(job, row)

    def _take(self, job: Job, row: Row) -> None:
        self._tokens_decoded += 1
        job.generated.append(row.token)
        logprob = job.drawing.logprob(row.token) if job.drawing is not None else None
        if row.token not in self._eos:
            job.send(Sampled(row.token, logprob))
        if row.finish is None:
            return
        self._decoding.pop(row.uid)
        if row.cache is not None and row.tokens is not None:
            self._prefill.store(job, as_tokens(row.tokens), row.cache)
        self._end(job, row.finish)

    # --- prefill ----------------------------------------------------------------

    def _prefill_step(self) -> None:
        """Up to a step's worth of prompt tokens, so that several short prompts join the batch together."""
        left = self._limits.step
        while left > 0:
            job = self._pick()
            if job is None:
                return
            before = job.position
            with self._failing(job):
                self._prefill.chunk(job, left)
                job.send(Prefilled(min(job.position, job.prefix) + 1, len(job.tokens)))
                if job.position >= job.prefix:
                    self._start_decoding(job)
            left -= max(1, job.position - before)

    def _pick(self) -> Job | None:
        """Alternates between the oldest and the one that is nearest to its first token."""
        for job in [j for j in self._prefilling if j.leader is not None and not self._leaders.must_wait(j)]:
            with self._failing(job):
                self._take_over(job)
        ready = [j for j in self._prefilling if j.leader is None and j.cache is not None]
        if not ready:
            return None
        self._turn += 1
        return ready[0] if self._turn % 2 else min(ready, key=lambda j: j.prefix - j.position)

    def _take_over(self, job: Job) -> None:
        """The leader got as far as `job` needs it, or is gone: `job` goes on with what is stored."""
        leader = job.leader
        if leader is not None and leader.stage is Stage.PREFILL:
            self._prefill.keep(leader)
        plan = self._store.lookup(job.tokens, limit=job.prefix)
        self._restore(job, plan, joined=plan.length - job.stored)

    def _start_decoding(self, job: Job) -> None:
        assert job.cache is not None
        self._prefill.keep(job, checkpoint=False)
        self._prefilling.remove(job)
        job.report = replace(job.report, seconds_prefill=self._clock() - job.admitted)
        cache, job.cache = job.cache, None
        job.drawing = drawing = self._draw(job.work)
        job.uid = self._runner.insert(
            job.work.prompt.tokens,
            cache,
            max_tokens=job.work.max_tokens,
            sampler=drawing.sampler,
            processors=drawing.processors,
        )
        job.stage = Stage.DECODE
        self._decoding[job.uid] = job


def _report(prompt: int, plan: Plan) -> CacheReport:
    """Counts, with the store's part of the explanation; `chat` keeps the miss only where more was computed than new."""
    return CacheReport(
        prompt=prompt,
        reused=plan.length,
        computed=prompt - plan.length,
        new=max(0, prompt - plan.seen),
        miss=Miss(plan.reason or ("diverged" if plan.seen else "first_turn"), plan.matched),
    )


def _as_error(error: Exception) -> StartLLMError:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return OutOfMemory("The request does not fit in this machine's memory.")
    return Internal(f"The model failed on this request: {type(error).__name__}: {error}")
