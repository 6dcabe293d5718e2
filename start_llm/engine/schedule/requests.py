"""Every request that has not ended yet, and how it leaves: done, cancelled, failed, or put back. Model thread only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from start_llm.core.errors import Internal, OutOfMemory, StartLLMError
from start_llm.core.work import Submit
from start_llm.engine.decode.draft import Counts
from start_llm.engine.decode.row import Cache
from start_llm.engine.schedule.jobs import EndReason, Job, Stage
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.prefill import Prefill
from start_llm.engine.schedule.prompts import Prompts
from start_llm.engine.schedule.rows import Rows
from start_llm.kvcache.blocks import as_tokens

log = logging.getLogger(__name__)


class Requests:
    """
    Attributes:
        decoded: what decoding those took that have ended.
        waiting: not admitted, or put back after they had run; the first one is next.
    """

    def __init__(
        self, prompts: Prompts, rows: Rows, prefill: Prefill, memory: MemoryGuard, clock: Callable[[], float]
    ) -> None:
        self._prompts, self._rows, self._prefill = prompts, rows, prefill
        self._memory, self._clock = memory, clock
        self._by_id: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.decoded = Counts()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_id.values()))

    def add(self, work: Submit) -> None:
        job = Job(work, as_tokens(work.prompt.tokens), submitted=self._clock())
        self._by_id[work.id] = job
        self.waiting.append(job)

    def cancel(self, work_id: str) -> None:
        """It ends before the next step; unknown ids are ignored."""
        job = self._by_id.get(work_id)
        if job is not None:
            job.cancelled = True

    @contextmanager
    def failing(self, job: Job) -> Iterator[None]:
        """What goes wrong inside ends this request and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged and sent to the client by `fail`
            self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        log.warning("request %s failed: %s", job.work.id, error, exc_info=not isinstance(error, StartLLMError))
        if job.stage is Stage.DECODE:
            self._take_out(job)
        try:
            self._forget(job)
        finally:
            job.fail(error if isinstance(error, StartLLMError) else _as_error(error))

    def fail_all(self, error: StartLLMError) -> None:
        """Ends everything; nothing of what was running is stored."""
        for job in self:
            self._forget(job)
            job.fail(error)
        self._rows.clear()

    def abort(self, job: Job, reason: EndReason) -> None:
        """Ends a job early; the KV that is already computed is kept."""
        if job.stage is Stage.PREFILL and job.position > job.report.reused:
            self._prefill.keep(job)
        elif job.stage is Stage.DECODE:
            self._store(job, self._take_out(job))
        self._end(job, reason)

    def finish(self, job: Job, reason: EndReason, kv: tuple[Cache, Sequence[int]] | None) -> None:
        """A job's row is done and has left the runner with this KV."""
        self._store(job, kv)
        self._end(job, reason)

    def put_back(self, job: Job, place: int = 0) -> None:
        """From prefill or decoding back to the queue. It goes on where it was once it is admitted again."""
        if job.stage is Stage.DECODE:
            self._store(job, self._take_out(job))
        self._memory.give(job.work.id)
        self._prompts.discard(job)
        job.pause(self._clock())
        self.waiting.insert(place, job)

    def pause(self, job: Job) -> bool:
        """Makes room: the job goes to the front of the queue and its KV to the store. False: not at this step."""
        row = None
        if job.stage is Stage.DECODE:
            row = self._rows.suspend(job)
            if row is None:
                return False
        self._memory.give(job.work.id)  # first, so that the store has the room
        if row is not None:
            self._store(job, (row.cache, row.tokens))
        elif job.position > job.report.reused:
            self._prefill.keep(job)
        self._prompts.discard(job)
        job.pause(self._clock(), None if row is None else row.newest)
        self.waiting.appendleft(job)
        return True

    def put_back_all(self) -> list[Job]:
        """Everything that runs, without its KV, and with a fresh runner."""
        running = [*self._rows.clear(), *self._prompts]
        for job in reversed(running):
            self.put_back(job)
        return running

    def _take_out(self, job: Job) -> tuple[Cache, Sequence[int]] | None:
        """The job's row leaves the runner, with its KV. If that fails, the other rows start again in a fresh one."""
        try:
            return self._rows.remove(job)
        except Exception:
            log.warning("the row of request %s could not be taken out", job.work.id, exc_info=True)
        for other in reversed(self._rows.clear()):
            self.put_back(other)
        return None

    def _store(self, job: Job, kv: tuple[Cache, Sequence[int]] | None) -> None:
        if kv is not None:
            cache, tokens = kv
            self._prefill.store(job, as_tokens(tokens), cache)

    def _end(self, job: Job, reason: EndReason) -> None:
        self._forget(job)
        job.end(reason)

    def _forget(self, job: Job) -> None:
        """Takes the job out of everything but the runner."""
        for name in ("forwards", "drafted", "accepted"):
            setattr(self.decoded, name, getattr(self.decoded, name) + getattr(job.counts, name))
        job.cache = None
        self._by_id.pop(job.work.id, None)
        self._prompts.discard(job)
        if job in self.waiting:
            self.waiting.remove(job)
        self._memory.give(job.work.id)


def _as_error(error: Exception) -> StartLLMError:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return OutOfMemory("The request does not fit in this machine's memory.")
    return Internal(f"The model failed on this request: {type(error).__name__}: {error}")
