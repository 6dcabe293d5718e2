"""Prompts that share a beginning which nobody has computed yet: one computes it, the others wait for it.

Model thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from start_llm.engine.schedule.jobs import Job, Stage
from start_llm.kvcache.blocks import common_prefix


class SharedPrefills:
    """
    Args:
        least: a shared beginning that is shorter than this is computed again rather than waited for.
    """

    def __init__(self, least: int) -> None:
        self._least = least

    def follow(self, job: Job, stored: int, others: Iterable[Job]) -> bool:
        """Makes `job` wait if one of the `others` is computing more of its prompt than the `stored` tokens.

        The leader will pause where the two part.
        """
        best: Job | None = None
        reach = stored + self._least
        for other in others:
            if other is job or other.leader is not None:
                continue
            shared = min(common_prefix(job.tokens, other.tokens), job.prefix, other.prefix)
            if shared > reach:
                best, reach = other, shared
        if best is None:
            return False
        job.leader, job.leader_until, job.stored = best, reach, stored
        if reach not in best.pauses and reach > best.position:
            best.pauses = sorted({*best.pauses, reach})
        return True

    def must_wait(self, job: Job) -> bool:
        """False once its leader got there or is gone, and for a job without one."""
        leader = job.leader
        return leader is not None and leader.stage is Stage.PREFILL and leader.position < job.leader_until
