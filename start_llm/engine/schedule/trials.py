"""Finds the row that a failed decode step is the fault of. Model thread only.

A decode step computes all rows together, so an error in it names none. Each row of that step is then *on trial*: it is
decoded alone for a few tokens. The one that fails alone is to blame and ends, the others go on together. Rows that fail
together but not alone (there may be memory for one of them only) are decoded alone to their ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from start_llm.engine.schedule.jobs import Job, Waiting
from start_llm.engine.schedule.requests import Requests, Rows

TRIAL_TOKENS = 3  # what a row must decode alone to be cleared


class Trials:
    """A job on trial has ``alone > 0``: the tokens that it has to decode alone yet."""

    def __init__(self, requests: Requests, rows: Rows) -> None:
        self._requests, self._rows = requests, rows

    def begin(self, jobs: Sequence[Job], *, valid: bool) -> None:
        """A step of these jobs failed, and their rows are gone. `valid`: see `KVStore.take_back`."""
        for job in reversed(jobs):
            job.failures += 1
            job.alone = TRIAL_TOKENS if job.failures == 1 else math.inf
            self._requests.put_back(job, valid=valid)

    def may_start(self, job: Job) -> bool:
        """Whether a waiting job may be admitted: those on trial one after the other."""
        return not job.alone or not any(other.alone for other in self._requests if not isinstance(other.state, Waiting))

    def may_decode(self, job: Job) -> bool:
        """Whether a job whose prompt is done may decode now: one on trial alone, the others after all trials."""
        return not len(self._rows) if job.alone else not any(other.alone for other in self._requests)

    def decoded(self, job: Job) -> None:
        """The job has decoded a token. Once it is cleared it makes room for the next trial, if there is one."""
        if not job.alone:
            return
        job.alone -= 1
        waiting = self._requests.waiting
        untried = [other for other in waiting if other.alone]
        if not job.alone and untried:
            self._requests.put_back(job, waiting.index(untried[-1]) + 1)
