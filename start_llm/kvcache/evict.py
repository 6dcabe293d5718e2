"""Brings stored KV back under its limits: bytes, age, ends, ghosts. `budget` says in which order things go."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from start_llm.kvcache import budget
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import StoreConfig

_GHOSTS_LEFT = 0.9  # of the limit: forgetting ghosts walks the tree, so it is not done for each one


class Eviction:
    """Model thread only.

    Attributes:
        budget_bytes: most bytes in memory; may be changed, `enforce` acts on it.
    """

    def __init__(self, kit: LayerKit, resident: ResidentKV, sessions: Sessions, config: StoreConfig) -> None:
        self.budget_bytes = config.budget_bytes
        self._kit, self._resident, self._sessions, self._config = kit, resident, sessions, config

    def enforce(self, now: float) -> None:
        """Evicts as much as all limits together ask for, and hands the freed memory back to the system."""
        resident, config = self._resident, self._config
        before = resident.nbytes
        if config.ttl_seconds:
            self._expire(now - config.ttl_seconds)
        if resident.nbytes > self.budget_bytes:
            self._evict(now, lambda: resident.nbytes > self.budget_bytes, thin=not self._kit.cuttable)
        if config.max_leaves:
            excess = sum(s.is_leaf for s in resident.tree) - config.max_leaves
            target = resident.counters["evicted"] + excess
            self._evict(now, lambda: resident.counters["evicted"] < target, thin=False)
        if resident.ghosts > config.ghost_tokens:
            resident.forget_ghosts(int(config.ghost_tokens * _GHOSTS_LEFT))
        if resident.nbytes < before:
            self._kit.free_buffers()

    def thin(self, end: Segment) -> list[Segment]:
        """Drops the checkpoints that the conversation of a new `end` has outgrown; returns where they were."""
        if self._kit.cuttable:
            return []
        outgrown = budget.thin_after(end, self._config)
        for segment in outgrown:
            self._resident.drop_checkpoint(segment)
        return outgrown

    def _expire(self, before: float) -> None:
        """Evicts what was not used since `before`."""
        todo = [s for s in self._resident.tree if s.is_leaf]
        while todo:
            segment = todo.pop()
            if segment.used >= before:
                continue
            if (above := self._resident.drop(segment)) is not None:
                todo.append(above)

    def _evict(self, now: float, more: Callable[[], bool], thin: bool) -> None:
        """Gives up leaves, and with `thin` checkpoints above them, in the order of their ranks."""
        if not more():
            return
        resident = self._resident
        strengths = self._sessions.protection(now, self.budget_bytes)
        below = budget.checkpoints_to_end(resident.tree, strengths) if thin else {}

        def rank(segment: Segment) -> budget.Rank:
            if segment.is_leaf:
                return budget.rank(segment, strengths, self._kit.cuttable, now)
            return budget.checkpoint_rank(segment, below[id(segment)], now)

        queue = [(rank(s), id(s), s) for s in resident.tree if s.is_leaf or (thin and s.checkpoint is not None)]
        heapq.heapify(queue)
        while more() and queue:
            before, _, segment = heapq.heappop(queue)
            if not segment.is_leaf and segment.checkpoint is None:
                continue
            here = rank(segment)
            if here > before:  # it has become a leaf, or the checkpoint above it has gone
                heapq.heappush(queue, (here, id(segment), segment))
            elif not segment.is_leaf:
                resident.drop_checkpoint(segment)
            elif (above := resident.drop(segment)) is not None:
                heapq.heappush(queue, (rank(above), id(above), above))
