"""In the idle gap, prefills what a client's next request is expected to look like. Model thread only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from start_llm.core.work import Submit
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.jobs import Job
from start_llm.engine.schedule.prefill import Prefill
from start_llm.kvcache.blocks import Tokens, as_tokens, common_prefix

log = logging.getLogger(__name__)

_REMEMBERED = 32


class IdlePrefill:
    """At most one piece of idle work at a time. Whatever goes wrong with it ends it and nothing else.

    Args:
        step: prompt tokens a chunk; small, so that a request never waits for long.

    Attributes:
        tokens: prompt tokens that were computed in idle gaps.
    """

    def __init__(self, prefill: Prefill, store: GuardedStore, step: int, clock: Callable[[], float]) -> None:
        self._prefill, self._store, self._step, self._clock = prefill, store, step, clock
        self._job: Job | None = None
        self._done: deque[tuple[Tokens, int, int]] = deque(maxlen=_REMEMBERED)  # prompt, computed from, to
        self.tokens = 0

    @property
    def waiting(self) -> bool:
        return self._job is not None

    def begin(self, work: Submit) -> None:
        """Replaces the pending work, if there is any."""
        self.end()
        self._job = Job(work, as_tokens(work.prompt.tokens), submitted=self._clock(), idle=True)

    def step(self) -> None:
        """Computes a small chunk."""
        job = self._job
        if job is None:
            return
        try:
            if job.cache is None and not self._restore(job):
                self._job = None
                return
            self.tokens += self._prefill.chunk(job, self._prefill.short_step(job, self._step))
            if job.position >= job.until:
                self.end()
        except Exception:
            log.warning("prefill in an idle gap failed", exc_info=True)
            self._job = None

    def end(self) -> None:
        """Stops and keeps what there is."""
        job, self._job = self._job, None
        if job is not None and job.cache is not None and job.position > job.report.reused:
            self._prefill.keep(job)
            self._done.append((job.tokens, job.report.reused, job.position))

    def forget(self) -> None:
        """Stops and keeps nothing."""
        self._job = None

    def share(self, tokens: Tokens, reused: int) -> int:
        """How many of the `reused` tokens of a prompt had been computed here."""
        best = 0
        for prefilled, start, end in self._done:
            shared = min(common_prefix(tokens, prefilled), reused, end)
            best = max(best, shared - start)
        return best

    def _restore(self, job: Job) -> bool:
        """False: nothing is to be done, or there is no room for it."""
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.until)
        if plan.length >= job.until or not self._store.has_room(job.until - plan.length):
            return False
        restored = self._store.restore(job.tokens, plan)
        job.cache, job.position = restored.cache, restored.length
        job.report = replace(job.report, reused=restored.length)
        job.pauses = list(self._store.pauses(job.work.prompt, job.position))
        return True
