"""The jobs that decode together. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from start_llm.core.events import TokenLogprob
from start_llm.core.work import Submit
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import Cache, DecodeRow, Processors, RowState, Sampler
from start_llm.engine.schedule.jobs import Job, Stage


class Drawing(Protocol):
    """How one request's tokens are drawn; holds state of its row (seed, grammar, penalties)."""

    sampler: Sampler
    processors: Processors
    drafts: RowDrafts

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

    def __init__(self, runner: ModelRunner, draw: Draw) -> None:
        self._runner, self._draw = runner, draw
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def insert(self, job: Job, cache: Cache) -> None:
        """The job starts, or goes on, to decode. `cache` holds `job.prefix` of its tokens."""
        tokens = job.tokens.tolist()
        pending, job.pending = job.pending, None
        if pending is None:
            job.drawing = self._draw(job.work, job.generated)
            pending, fresh = tokens.pop(), True
        else:
            fresh = False
        drawing = job.drawing
        drawing.drafts.counts = job.counts
        row = RowState(
            cache, tokens, pending, job.left, drawing.sampler, drawing.processors, fresh=fresh, drafts=drawing.drafts
        )
        job.uid = self._runner.insert(row)
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

    def suspend(self, job: Job) -> RowState | None:
        """Takes a job out in the middle of its answer; ``None``: not now, see `ModelRunner.suspend`."""
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
