"""The jobs that decode together. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from start_llm.core.events import TokenLogprob
from start_llm.core.work import Submit
from start_llm.engine.decode.draft import DraftSource, RowDrafts
from start_llm.engine.decode.runner import Cache, DecodeRow, DecodeRunner, Suspended
from start_llm.engine.schedule.jobs import Job, Stage

Processors = list[Callable[[Any, Any], Any]]


class Drawing(Protocol):
    """How one request's tokens are drawn; holds state of its row (seed, grammar, penalties)."""

    sampler: Callable[[Any], Any]
    processors: Processors

    @property
    def drafter(self) -> DraftSource | None:
        """``None``: nothing is drafted."""
        ...

    def logprob(self, token: int) -> TokenLogprob | None:
        """Of the row's next reported token, if the client asked; called once per token, in order.

        Raises what went wrong in the row's own sampler, penalties or grammar: such a request ends with an error,
        never with garbage, and the other rows of the step do not notice.
        """
        ...


Draw = Callable[[Submit, Sequence[int]], Drawing]
"""Makes a request's drawing, as it is after these tokens were drawn: a row that was interrupted goes on the same."""


class Rows:
    """Which job is which row of the runner."""

    def __init__(self, runner: DecodeRunner, draw: Draw) -> None:
        self._runner, self._draw = runner, draw
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def insert(self, job: Job, cache: Cache) -> None:
        """The job starts, or goes on, to decode. `cache` holds `job.prefix` of its tokens."""
        tokens = job.tokens.tolist() if job.generated else job.work.prompt.tokens
        pending, job.pending = job.pending, None
        if pending is None:
            job.drawing = self._draw(job.work, job.generated)
        source = job.drawing.drafter
        drafts = RowDrafts(counts=job.counts) if source is None else RowDrafts(source, source.acceptance, job.counts)
        how = {
            "max_tokens": job.left,
            "sampler": job.drawing.sampler,
            "processors": job.drawing.processors,
            "drafts": drafts,
        }
        if pending is None:
            job.uid = self._runner.insert(tokens, cache, **how)
        else:
            job.uid = self._runner.resume(Suspended(cache, tokens, pending), **how)
        job.stage = Stage.DECODE
        self._jobs[job.uid] = job

    def step(self) -> list[tuple[Job, DecodeRow]]:
        """One decode step of all rows. Rows that are finished leave the runner by themselves."""
        if not self._jobs:
            return []
        rows = self._runner.decode()
        for row in rows:
            if row.uid not in self._jobs and row.finish is None:  # its insertion failed half-way
                self._runner.remove(row.uid)
        found = [(self._jobs[row.uid], row) for row in rows if row.uid in self._jobs]
        for _, row in found:
            if row.finish is not None:
                del self._jobs[row.uid]
        return found

    def suspend(self, job: Job) -> Suspended | None:
        """Takes a job out in the middle of its answer; ``None``: not now, see `DecodeRunner.suspend`."""
        row = self._runner.suspend(job.uid)
        if row is not None:
            del self._jobs[job.uid]
        return row

    def remove(self, job: Job) -> tuple[Cache, Sequence[int]] | None:
        """Takes a job out and returns its KV and the tokens in it; ``None`` if it is not here."""
        if self._jobs.get(job.uid) is not job:
            return None
        del self._jobs[job.uid]
        return self._runner.remove(job.uid)

    def clear(self) -> list[Job]:
        """Drops all rows and the runner's state with them. Returns the jobs, oldest first."""
        self._runner.clear()
        jobs = list(self._jobs.values())
        self._jobs.clear()
        return jobs
