"""The jobs whose prompts are being computed, and which of them is next. Model thread only.

Of prompts that share a beginning which nobody has computed yet, one computes it (the leader), the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from start_llm.core.events import Progress, Started
from start_llm.core.report import CacheReport, Miss
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.idle_prefill import IdlePrefill
from start_llm.engine.schedule.jobs import Job, Stage
from start_llm.engine.schedule.prefill import Prefill
from start_llm.kvcache.blocks import common_prefix
from start_llm.kvcache.types import RestorePlan


class Prompts:
    """
    Args:
        least_shared: a shared beginning that is shorter than this is computed again rather than waited for.

    Attributes:
        trim_misses: restores that were shorter than what is stored, for want of a checkpoint.
    """

    def __init__(
        self,
        store: GuardedStore,
        prefill: Prefill,
        least_shared: int,
        idle_prefill: IdlePrefill,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._prefill, self._least_shared = store, prefill, least_shared
        self._idle_prefill, self._clock = idle_prefill, clock
        self._jobs: list[Job] = []
        self._turn = 0
        self.trim_misses = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def begin(self, job: Job) -> None:
        """Plans and restores, unless another job is computing more of this prompt than is stored."""
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.prefix)
        job.stage, job.watched = Stage.PREFILL, self._clock()
        job.admitted = job.admitted or job.watched
        self._jobs.append(job)
        if not self._follow(job, plan.length):
            self._restore(job, plan, joined=0)

    def discard(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def clear(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def released(self) -> list[Job]:
        """Jobs that waited for another one's KV, which is there now or will not come."""
        return [job for job in self._jobs if job.leader is not None and not job.must_wait]

    def _follow(self, job: Job, stored: int) -> bool:
        """Makes `job` wait if another one is computing more of its prompt than the `stored` tokens.

        The leader will pause where the two part.
        """
        leader: Job | None = None
        reach = stored + self._least_shared
        for other in self._jobs:
            if other is job or other.leader is not None:
                continue
            shared = min(common_prefix(job.tokens, other.tokens), job.prefix, other.prefix)
            if shared > reach:
                leader, reach = other, shared
        if leader is None:
            return False
        job.leader, job.leader_until, job.stored = leader, reach, stored
        if reach not in leader.pauses and reach > leader.position:
            leader.pauses = sorted({*leader.pauses, reach})
        return True

    def take_over(self, job: Job) -> None:
        """A job of `released` goes on from the KV that is stored by now."""
        leader = job.leader
        if leader is not None and leader.stage is Stage.PREFILL:
            self._prefill.keep(leader)
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.prefix)
        self._restore(job, plan, joined=plan.length - job.stored)

    def next(self, may_decode: Callable[[Job], bool]) -> Job | None:
        """Alternates between the oldest and the one that is nearest to its first token.

        Args:
            may_decode: whether a job whose prompt is done may start to decode now; else it is passed over.
        """
        here = [job for job in self._jobs if job.leader is None and job.cache is not None]
        ready = [job for job in here if job.position < job.prefix or may_decode(job)]
        if not ready:
            return None
        self._turn += 1
        return ready[0] if self._turn % 2 else min(ready, key=lambda job: job.prefix - job.position)

    def compute(self, job: Job, step: int) -> int:
        """A chunk of at most `step` tokens. Returns the tokens done."""
        done = self._prefill.chunk(job, step)
        job.send(Progress(min(job.position + 1, len(job.tokens)), len(job.tokens), job.computed))
        now = self._clock()
        for waiting in self._jobs:  # where prefill makes progress, nobody's time runs out
            waiting.watched = now
        return done

    def _restore(self, job: Job, plan: RestorePlan, joined: int) -> None:
        restored = self._store.restore(job.tokens, plan)
        self.trim_misses += plan.reason == "no_checkpoint"
        job.cache, job.position, job.leader = restored.cache, restored.length, None
        job.pauses = [p for p in self._store.pauses(job.work.prompt, job.position) if p < job.prefix]
        if job.planned:
            return  # it goes on after an interruption
        job.report = replace(
            report_of(len(job.tokens), plan),
            reused=restored.length,
            computed=len(job.tokens) - restored.length,
            joined=max(0, min(joined, restored.length)),
            computed_idle=self._idle_prefill.share(job.tokens, restored.length),
            copied_bytes=restored.copied_bytes,
            seconds_queued=job.admitted - job.submitted,
        )
        job.send(Started(job.report))
        job.planned = True


def report_of(prompt: int, plan: RestorePlan) -> CacheReport:
    """Counts, with the store's part of the explanation; `chat` keeps the miss only where more was computed than new."""
    return CacheReport(
        prompt=prompt,
        reused=plan.length,
        computed=prompt - plan.length,
        new=max(0, prompt - plan.seen),
        miss=Miss(
            plan.reason or ("diverged" if plan.seen else "first_turn"),
            plan.matched,
            stored=plan.behind if plan.matched == plan.seen < prompt else (),
        ),
    )
