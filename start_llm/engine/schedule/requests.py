"""Every request that has not ended yet: those that decode, and how each leaves. Model thread only."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from start_llm.core.errors import Internal, OutOfMemory, StartLLMError
from start_llm.core.work import Submit
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import Cache, DecodeRow, RowState
from start_llm.engine.decode.sampling import TextDrawing
from start_llm.engine.schedule.jobs import Decoding, EndReason, Job, Prefilling, Waiting
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.prefill import Prefill, Prompts, trusted
from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.types import KVReader, StoredEnd

log = logging.getLogger(__name__)

Draw = Callable[[Submit, Sequence[int]], TextDrawing]
"""Makes a request's drawing, as it is after these tokens were drawn: a row that was interrupted goes on the same."""


class Rows:
    """Which job is which row of the runner."""

    def __init__(self, runner: ModelRunner, draw: Draw) -> None:
        self._runner, self._draw = runner, draw
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    @property
    def are_urgent(self) -> bool:
        """There are rows, and all of them answer small questions."""
        return bool(self._jobs) and all(job.urgent for job in self._jobs.values())

    def prepare(self, job: Job) -> None:
        """To be called before its prefill: the index of its drafts is built meanwhile."""
        if job.drawing is None:
            job.drawing = self._draw(job.work, job.generated)

    def insert(self, job: Job, cache: Cache, on_move: Callable[[KVReader | None], None]) -> None:
        """The job starts, or goes on, to decode. `cache` holds `job.prefix` of its tokens. `on_move`: of `RowState`."""
        tokens, newest, fresh = job.tokens.tolist(), job.pending, job.pending is None
        if fresh:
            newest = tokens.pop()
        job.pending = None
        drawing = job.drawing
        drawing.drafts.counts = job.counts
        row = RowState(
            cache, tokens, newest, job.left, drawing.sampler, drawing.processors, fresh, drawing.drafts, on_move
        )
        job.state = Decoding(self._runner.insert(row), row.states)
        self._jobs[job.state.uid] = job

    def step(self) -> list[tuple[Job, DecodeRow]]:
        """One decode step of all rows. Rows that are finished leave the runner by themselves."""
        if not self._jobs:
            return []
        found = [(self._jobs[row.uid], row) for row in self._runner.decode()]
        for _, row in found:
            if row.finish is not None:
                del self._jobs[row.uid]
        return found

    def calls(self, job: Job) -> bool | None:
        """Whether there is a call in the job's answer; ``None``: nobody knows."""
        return self._runner.calls(job.generated)

    def suspend(self, job: Job) -> RowState | None:
        """Takes a job out in the middle of its answer; ``None``: not now, see `ModelRunner.suspend`."""
        assert isinstance(job.state, Decoding)
        row = self._runner.suspend(job.state.uid)
        if row is not None:
            del self._jobs[job.state.uid]
        return row

    def remove(self, job: Job) -> tuple[Cache, Sequence[int]] | None:
        """Takes a job out and returns its KV and the tokens in it; ``None`` if it is not here."""
        if not isinstance(job.state, Decoding) or self._jobs.pop(job.state.uid, None) is None:
            return None
        return self._runner.remove(job.state.uid)

    def clear(self) -> list[Job]:
        """Drops all rows and the runner's state with them. Returns the jobs, oldest first."""
        self._runner.clear()
        jobs = list(self._jobs.values())
        self._jobs.clear()
        return jobs


class Requests:
    """
    Attributes:
        decoded: what decoding those took that have ended.
        full: of those that wait, the next one found no place or no memory.
        waiting: not admitted, or put back after they had run; the first one is next.
    """

    def __init__(
        self, prompts: Prompts, rows: Rows, prefill: Prefill, memory: MemoryGuard, clock: Callable[[], float]
    ) -> None:
        self._prompts, self._rows, self._prefill = prompts, rows, prefill
        self._memory, self._clock = memory, clock
        self._by_id: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.decoded: Counter[str] = Counter()
        self.full = False

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

    def may_start(self, job: Job) -> bool:
        """Whether a waiting job may be admitted: those of a step that failed one after the other."""
        return not job.alone or not any(other.alone for other in self if not isinstance(other.state, Waiting))

    def may_decode(self, job: Job) -> bool:
        """Whether a job whose prompt is done may decode: one of a step that failed alone, the others after those.

        Unless those cannot be admitted before others end: then nobody would ever decode.
        """
        if job.alone:
            return not len(self._rows)
        before = [other for other in self if other.alone]
        return not before or (self.full and all(isinstance(other.state, Waiting) for other in before))

    @contextmanager
    def failing(self, job: Job) -> Iterator[None]:
        """What goes wrong inside ends this request and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged and sent to the client by `fail`
            self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a request with its final event. What is no StartLLMError becomes one; its traceback is logged."""
        log.warning("request %s failed: %s", job.work.id, error, exc_info=not isinstance(error, StartLLMError))
        if isinstance(job.state, Decoding):
            self._take_out(job)
        try:
            self._forget(job, valid=trusted(error))
        finally:
            job.fail(error if isinstance(error, StartLLMError) else _as_error(error))

    def fail_all(self, error: StartLLMError) -> None:
        """Ends everything; of prompts that are being computed what is there is kept, so a restart goes on from it."""
        for job in self:
            self._keep_prefill(job)
            self._forget(job, valid=isinstance(job.state, Prefilling))
            job.fail(error)
        self._rows.clear()

    def abort(self, job: Job, reason: EndReason) -> None:
        """Ends a job early; the KV that is already computed is kept."""
        self._keep_prefill(job)
        kv = self._take_out(job) if isinstance(job.state, Decoding) else None
        if kv is not None and not job.generated:  # the pass that ends the prompt may be done, and its token not told
            job.computed += len(kv[1]) > job.prefix
        self.finish(job, reason, kv)

    def _keep_prefill(self, job: Job) -> None:
        if isinstance(job.state, Prefilling) and not job.is_new:
            self._prefill.keep(job)

    def finish(self, job: Job, reason: EndReason, kv: tuple[Cache, Sequence[int]] | None) -> None:
        """A job ends; its row, if there was one, has left the runner with this KV."""
        self._store(job, kv, answered=True)
        self._forget(job)
        job.end(reason)

    def put_back(self, job: Job, *, valid: bool = True) -> None:
        """From prefill or decoding to the front of the queue. It goes on where it was once it is admitted again.

        `valid`: see `KVStore.take_back`.
        """
        if isinstance(job.state, Decoding):
            self._store(job, self._take_out(job))
        self._memory.give(job.work.id)
        self._to_waiting(job, valid=valid)

    def pause(self, job: Job) -> bool:
        """Makes room: the job goes to the front of the queue and its KV to the store. False: not at this step."""
        row = self._rows.suspend(job) if isinstance(job.state, Decoding) else None
        if row is None and isinstance(job.state, Decoding):
            return False
        self._memory.give(job.work.id)  # first, so that the store has the room
        if row is not None:
            self._store(job, (row.cache, row.tokens))
        self._keep_prefill(job)
        self._to_waiting(job, None if row is None else row.newest)
        return True

    def _to_waiting(self, job: Job, pending: int | None = None, *, valid: bool = True) -> None:
        """To the front of the queue, without KV. `pending`: see `Job.pause`. `valid`: see `KVStore.take_back`."""
        self._prompts.discard(job)
        self._prefill.take_back(job, valid=valid)
        job.pause(self._clock(), pending)
        self.waiting.appendleft(job)

    def _take_out(self, job: Job) -> tuple[Cache, Sequence[int]] | None:
        """The job's row leaves the runner, with its KV. If that fails, the other rows start again in a fresh one."""
        try:
            return self._rows.remove(job)
        except Exception as error:
            log.warning("the row of request %s could not be taken out", job.work.id, exc_info=True)
            valid = trusted(error)
        self._prefill.take_back(job, valid=valid)
        for other in reversed(self._rows.clear()):
            self.put_back(other, valid=valid)
        return None

    def _store(self, job: Job, kv: tuple[Cache, Sequence[int]] | None, *, answered: bool = False) -> None:
        """Layers of a row that has left the runner, and the tokens in them; ``None``: nothing is stored."""
        if kv is not None:
            cache, tokens = kv
            calls = self._rows.calls(job) if answered else None
            states = job.state.states if isinstance(job.state, Decoding) else ()
            about = StoredEnd(states=states, answered=answered, calls=calls)
            self._prefill.store(job, as_tokens(tokens), cache, about)

    def _forget(self, job: Job, *, valid: bool = True) -> None:
        """Takes the job out of everything but the runner. `valid`: see `KVStore.take_back`."""
        self.decoded.update(asdict(job.counts))
        self._by_id.pop(job.work.id, None)
        self._prompts.discard(job)
        if job in self.waiting:
            self.waiting.remove(job)
        try:
            self._memory.give(job.work.id)  # first, so that the store has the room
        finally:
            self._prefill.take_back(job, valid=valid)


def _as_error(error: Exception) -> StartLLMError:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return OutOfMemory("The request does not fit in this machine's memory.")
    return Internal(f"The model failed on this request: {type(error).__name__}: {error}")
