"""Which work the model does next. Model thread only; touches no array: effects go in as `ModelRunner`, `GuardedStore`.

The idea: a request is *waiting*, then its prompt is computed in chunks (*prefill*), then its answer token by token
(*decode*); it is *running* in the last two. A step is: end what is cancelled or late, admit what fits, one decode pass
of all rows, one prefill chunk of one request. With both kinds of work there, rows that decode get `decode_share` of the
time, so some steps have no chunk. Prefill is done row by row, so that it can pause, stop or be joined at any token; all
rows decode together. A request can go back to waiting at any time (*preempt*): what it has generated becomes part of
its prompt, its KV lies in the store, and it goes on with the token that was next.

What goes wrong with one request ends that request. A decode step computes all rows together, so an error in it names
none: the rows of that step are then decoded one after the other, and the one that fails alone ends. The collaborators:
`requests` (all of them, and how they end), `prompts` (those in prefill), `rows` (those that decode), `preemption`
(memory is short), `idle_prefill` (work for the idle gap).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

from start_llm.core.errors import StartLLMError
from start_llm.core.events import Sampled
from start_llm.core.report import DRAFT_COUNTS
from start_llm.core.work import Submit
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.jobs import Decoding, Job
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.preemption import Preemption
from start_llm.engine.schedule.prefill import IdlePrefill, Prefill, Prompts, trusted
from start_llm.engine.schedule.requests import Draw, Requests, Rows
from start_llm.engine.schedule.steps import DecodeShare, StepSize
from start_llm.engine.schedule.urgent import is_question
from start_llm.models.device import PREFILL_BYTES

log = logging.getLogger(__name__)

MOST_FAILURES = 3  # steps that may fail around a request before it is given up
_LOOKS = 8  # at the requests' time, at least, before one is ended by it


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds the steps of a scheduler."""

    step: int | None  # prompt tokens a chunk, ``None`` if it follows what chunks take
    idle_step: int = 128  # the most of idle work: a request that comes then hardly waits
    step_bytes: int = PREFILL_BYTES  # memory that a chunk may take, where its size is not fixed
    deadline: float = 0.0  # seconds of decoding, or of prefill without progress, until a request is ended; 0: no end
    join: int = 64  # a shared prefix shorter than this is computed again rather than waited for
    decode_share: float = 0.0  # see `steps.DecodeShare`


class Scheduler:
    """
    Attributes:
        store: may be looked at by any thread: `show`, `peek`.
        requests: all that have not ended.
        idle_prefill: what is done while there are none.
        crowded: others wait for the thread, too: prefill chunks are small then.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: GuardedStore,
        draw: Draw,
        *,
        limits: SchedulerLimits,
        max_concurrency: int,
        memory: MemoryGuard,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._limits, self._clock = limits, clock
        self._most_running = min(max_concurrency, runner.max_rows)
        self._share = DecodeShare(limits.decode_share)
        self._prefill = Prefill(runner, store, StepSize(limits.step, limits.step_bytes), clock)
        idle_step = min(limits.idle_step, limits.step or limits.idle_step)
        self.idle_prefill = IdlePrefill(self._prefill, store, idle_step, clock)
        self._prompts = Prompts(store, self._prefill, limits.join, self.idle_prefill, clock)
        self._rows = Rows(runner, draw)
        self.requests = Requests(self._prompts, self._rows, self._prefill, memory, clock)
        self._preemption = Preemption(self.requests, memory)
        self._tokens_decoded = 0
        self._failed_steps = 0
        self._looked = math.inf
        self.crowded = False

    @property
    def running(self) -> int:
        return len(self._prompts) + len(self._rows)

    @property
    def busy(self) -> bool:
        return len(self.requests) > 0

    def add(self, work: Submit) -> None:
        self.requests.add(work)

    def add_idle(self, work: Submit) -> None:
        """Work for an idle gap; it replaces what was there."""
        self.idle_prefill.begin(work)

    def cancel(self, work_id: str) -> None:
        """The request ends before the next step; unknown ids are ignored."""
        self.requests.cancel(work_id)

    def step_idle(self) -> None:
        """Computes a small chunk of idle work."""
        self.idle_prefill.step()

    def pause_idle(self) -> None:
        """Another model works: see `IdlePrefill.give_way`."""
        self.idle_prefill.give_way()

    def tidy(self) -> None:
        """To be called now and then while nothing runs."""
        self.store.idle()

    def fail_all(self, error: StartLLMError) -> None:
        """Ends everything: see `Requests.fail_all`."""
        self.requests.fail_all(error)

    def digest(self) -> int:
        """A number that is the same for two schedulers that go on in the same way. Asked before each step."""
        jobs = []
        for job in self.requests:  # its stage, and how far its prefill is
            state = type(job.state).__name__, getattr(job.state, "position", 0)
            jobs.append((job.work.id, state, job.prefix, len(job.generated), job.generated[-1:]))
        return crc32(repr((jobs, self._tokens_decoded, self._prefill.tokens, self.store.digest())).encode())

    def step(self) -> None:
        """One step of everything that runs, called by `LoadedModels.step`; what it raises goes to `recover`."""
        self._reap()
        if self.busy:
            self.idle_prefill.end()
        self._preemption.relieve()
        self._admit()
        self._decode()
        late = self._rows.are_urgent and not self._prompts.urgent.goes_first
        if not len(self._rows) or self._share.may_prefill or late or self._prompts.question_first:
            self._compute()

    def recover(self, error: Exception) -> None:
        """After `step` has raised, outside of any request's own work: what was running starts again. A request that was
        there each of `MOST_FAILURES` times is given up."""
        self._failed_steps += 1
        self.idle_prefill.forget(valid=trusted(error))
        for job in reversed([*self._rows.clear(), *self._prompts]):
            self.requests.put_back(job, valid=trusted(error))
        for job in self.requests:
            job.failures += 1
            if job.failures >= MOST_FAILURES:
                self.requests.fail(job, error)

    def figures(self) -> dict[str, float]:
        """Totals of the work done and the store's sizes, by the names that `/metrics` shows."""
        return {
            "tokens_prefilled": self._prefill.tokens,
            "tokens_prefilled_idle": self.idle_prefill.tokens,
            "tokens_decoded": self._tokens_decoded,
            **{f"tokens_{name}": self.requests.decoded[name] for name in DRAFT_COUNTS[1:]},
            "decode_forwards": self.requests.decoded["forwards"],
            "hybrid_trim_miss": self._prompts.trim_misses,
            "failed_steps": self._failed_steps,
            "requests_paused": self._preemption.paused,
            **self.store.figures(),
        }

    # --- the parts of a step --------------------------------------------------

    def _reap(self) -> None:
        """Ends jobs that are cancelled or late. Of seconds in which the process was stopped few count."""
        now, limit = self._clock(), self._limits.deadline or math.inf
        # Of what passed since the last look, more than a part of the limit was a process that was stopped.
        stopped, self._looked = max(0.0, now - self._looked - limit / _LOOKS), now
        for job in self.requests:
            if job.watched is not None:
                job.watched = min(now, job.watched + stopped)
            if job.cancelled or job.seconds(now) >= limit:
                with self.requests.failing(job):
                    self.requests.abort(job, "cancelled" if job.cancelled else "deadline")

    def _admit(self) -> None:
        """From waiting to prefill, while there are places and memory; a small question first, where it is its turn."""
        waiting = self.requests.waiting
        self.requests.full = False
        while waiting and self.running < self._most_running:
            job = waiting[0]
            if self._prompts.urgent.goes_first:
                job = next((one for one in waiting if is_question(one.work, one.prefix)), job)
            if not self.requests.may_start(job):
                return
            with self.requests.failing(job):
                if not self._preemption.admit(job):
                    self.requests.full = True
                    return
                waiting.remove(job)
                self._rows.prepare(job)
                self._prompts.begin(job)
                self._preemption.restored(job)
        self.requests.full = bool(waiting)

    def _decode(self) -> None:
        """One pass of all rows. If it fails, each is decoded alone from then on; who fails alone ends."""
        began, urgent = self._clock(), self._rows.are_urgent
        try:
            rows = self._rows.step()
        except Exception as error:
            self._failed_steps += 1
            jobs = self._rows.clear()
            if len(jobs) == 1:
                self.requests.fail(jobs[0], error)
                return
            log.warning("a step of %d rows failed; each is decoded alone now", len(jobs), exc_info=True)
            for job in reversed(jobs):
                job.alone = True
                self.requests.put_back(job, valid=trusted(error))
            return
        if rows:
            seconds = self._clock() - began
            self._share.decoded(seconds)
            self._charge(seconds, urgent=urgent)
        for job, row in rows:
            if not isinstance(job.state, Decoding):
                continue  # put back meanwhile: it will draw this token again
            with self.requests.failing(job):
                self._tokens_decoded += 1
                job.generated.append(row.token)
                logprob = job.drawing.logprob(row.token)
                if row.finish != "stop":
                    job.send(Sampled(row.token, logprob))
                if row.finish is not None:
                    kv = None if row.cache is None or row.tokens is None else (row.cache, row.tokens)
                    self.requests.finish(job, row.finish, kv)

    def _charge(self, seconds: float, *, urgent: bool) -> None:
        """Small questions, or others, have had so much time."""
        if not urgent or any(not job.urgent for job in (*self._prompts, *self._rows)):
            self._prompts.urgent.took(seconds, urgent=urgent)

    def _compute(self) -> None:
        """Up to a step's worth of prompt tokens, so that several short prompts join the batch together."""
        began, question = self._clock(), self._prompts.question_first
        decoding = len(self._rows) > 0
        left: float = math.inf
        while left > 0:
            for job in self._prompts.released():
                with self.requests.failing(job):
                    self._prompts.take_over(job)
            next_job = self._prompts.next(self.requests.may_decode)
            if next_job is None:
                break
            done = 0
            shared, expecting = self.crowded or len(self.requests) > 1, self._prompts.urgent.is_expected
            if next_job.urgent:  # other questions come behind it: it is done soonest in one piece
                shared, expecting = self.crowded or (decoding and not self._rows.are_urgent), False
            at, before = next_job.prefill, self._clock()
            left = min(left, self._prefill.steps.next(at.position, shared=shared, expecting=expecting))
            with self.requests.failing(next_job):
                done = self._prompts.compute(next_job, int(left))
                self._charge(self._clock() - before, urgent=next_job.urgent)
                if at.position >= next_job.prefix and self.requests.may_decode(next_job):
                    self._start_decoding(next_job)
                    if next_job.urgent and not self._prompts.ends_question(left - done):
                        left = 0  # its first token comes before a part of another prompt
            left -= max(1, done)
        if decoding and left < math.inf and not question:
            self._share.prefilled(self._clock() - began)

    def _start_decoding(self, job: Job) -> None:
        """A job whose prompt is done: what it computed is stored, and it becomes a row."""
        cache = job.prefill.cache
        assert cache is not None
        self._prefill.keep(job, checkpoint=False)
        self._prompts.discard(job)
        if not job.generated:
            job.report = replace(job.report, seconds_prefill=self._clock() - job.admitted)
        job.allowed = self._preemption.allowed(job)
        self._rows.insert(job, cache, partial(self._prefill.moved, job))
