"""What to do when running requests outgrow memory: the youngest is paused and goes on later. Model thread only.

A request may generate as much as its context has left, and hardly any does. So a typical answer is reserved for it, and
more as it grows. If that does not fit, the youngest row leaves the batch, its KV goes to the store, and it waits in
front of the queue. Nothing of it is lost: it goes on with the token that it was about to report.
"""

from __future__ import annotations

import logging

from start_llm.core.errors import StartLLMError
from start_llm.engine.schedule.jobs import Decoding, Job, Prefilling
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.requests import Requests

log = logging.getLogger(__name__)

TYPICAL_ANSWER = 1024  # tokens reserved for an answer
LEAST_ANSWER = 64  # a prompt that leaves no room for so much of an answer is refused
GROWTH = 256  # tokens reserved at a time while a row grows; mlx-lm's buffers grow in the same steps


class Preemption:
    """`paused`: times that a request was paused."""

    def __init__(self, requests: Requests, memory: MemoryGuard) -> None:
        self._requests, self._memory = requests, memory
        self.paused = 0

    def admit(self, job: Job) -> bool:
        """Reserves memory for a waiting job, an answer included. False: it does not fit beside those that run.

        Stored KV of its prompt is already counted in the store. To reserve it again would make the store evict it, so
        only the rest is reserved here; `restored` takes over the stored part. Raises OutOfMemory: it would not fit even
        alone, and with no other model loaded that may go.
        """
        wanted = self._wanted(job)
        if not (self._memory.check(self._least(job)) and self._memory.admits(wanted)):
            return False
        stored = self._memory.store.lookup(job.tokens, limit=job.prefix).length
        self._memory.take(job.work.id, max(1, wanted - stored))
        return True

    def restored(self, job: Job) -> None:
        """The job has taken over what was stored: all of it is the job's now, and reserved for it."""
        self._memory.take(job.work.id, self._wanted(job))

    def allowed(self, job: Job) -> int:
        """Tokens that the job may generate in all. It ends there with the reason ``length``."""
        most = self._memory.most_tokens()
        asked = job.work.max_tokens
        return asked if most is None else max(1, min(asked, most - len(job.work.prompt.tokens)))

    def relieve(self) -> None:
        """To be called before each step: reserves what running jobs grow into, and pauses until all of it fits."""
        running = [job for job in self._requests if isinstance(job.state, Prefilling | Decoding)]
        for job in running:
            if job.length >= self._memory.holds(job.work.id):
                self._memory.take(job.work.id, job.length + GROWTH)
        running.sort(key=lambda job: job.submitted)
        while self._memory.over and running:
            job = running.pop()
            if not running and not self._memory.crowded:
                self._refuse(job)
            elif not self._requests.pause(job):
                return  # it is about to end, or has just begun: the next step will see
            else:
                self.paused += 1
                log.info("request %s is paused at %d tokens: memory is short", job.work.id, job.length)

    def _refuse(self, job: Job) -> None:
        """It runs alone and is too large. While it decodes that is an estimate that was off by a little: it goes on."""
        if not isinstance(job.state, Prefilling):
            return
        try:
            self._memory.check(self._least(job))
        except StartLLMError as error:
            self._requests.fail(job, error)

    def _least(self, job: Job) -> int:
        return job.length + min(job.left, LEAST_ANSWER)

    def _wanted(self, job: Job) -> int:
        return job.length + min(job.left, TYPICAL_ANSWER)
