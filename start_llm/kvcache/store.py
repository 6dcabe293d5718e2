"""The owner of stored KV: finds, restores, stores and evicts. Model thread only; no locks.

What a request does here, in order: `lookup` (how much is there), `pauses` (where its prefill should
stop for a moment), `restore`, then `put` at each pause, after the prefill and after the generation.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from start_llm.core.prompt import Prompt
from start_llm.kvcache import budget, planner
from start_llm.kvcache.blocks import PrefixHash, TokenMemo, Tokens, TokenSequence
from start_llm.kvcache.disk import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.paging import Paging, chain_of
from start_llm.kvcache.pieces import Checkpoint, Plan, Restored, Slices, Unstorable
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.stats import Counters, StoreStats
from start_llm.kvcache.tree import Match, Segment, Tree

__all__ = ["Counters", "KVStore", "Plan", "Restored", "StoreStats"]

log = logging.getLogger(__name__)

_HEADS = 256


class KVStore:
    """Stored KV of one model.

    Args:
        kit: cuts and rebuilds the model's caches.
        budget_bytes: most bytes of KV in memory.
        checkpoints_recent: message boundaries near the end that keep a checkpoint.
        checkpoint_grid: most tokens between two restore points.
        ttl_seconds: KV unused for so long leaves memory (0: never).
        session_idle_seconds: a conversation idle for longer loses its protection (0: never).
        sessions_keep: protected ends of one conversation.
        block_size, use_block_index: taken for old configurations. A walk of the tree compares tokens, so it
            is exact and costs a tenth of hashing them; hashes name prefixes on disk.
        disk: keeps KV beyond memory and beyond the process; the store closes it.
        max_leaves: most conversation ends (0: bounded by bytes only).
        ghost_tokens: most tokens remembered after their KV was evicted.
        clock: seconds.
    """

    def __init__(
        self,
        kit: LayerKit,
        *,
        budget_bytes: int,
        block_size: int = 16,
        checkpoints_recent: int = 8,
        checkpoint_grid: int = 1024,
        ttl_seconds: float = 0,
        session_idle_seconds: float = 1800,
        sessions_keep: int = 2,
        max_leaves: int = 0,
        use_block_index: bool = True,
        disk: DiskTier | None = None,
        ghost_tokens: int = 4_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kit = kit
        self._budget = budget_bytes
        self._policy = budget.Policy(kit.cuttable, checkpoints_recent, checkpoint_grid)
        self._ttl = ttl_seconds
        self._max_leaves = max_leaves
        self._ghost_limit = ghost_tokens
        self._clock = clock
        self._memo = TokenMemo()
        self._paging = Paging(kit, disk) if disk is not None and disk.active else None
        self._tree = Tree(self._divide, divided=self._paging.divided if self._paging is not None else None)
        self._sessions = Sessions(session_idle_seconds, sessions_keep)
        self._bytes = 0
        self._ghosts = self._paging.fill(self._tree) if self._paging is not None else 0
        self._heads: OrderedDict[bytes, int] = OrderedDict()  # hash and length of system texts seen lately
        self._token_bytes = 0.0  # of the last rows and the last checkpoint, to estimate others
        self._state_bytes = 0
        self._counters = Counters()

    # --- reading ------------------------------------------------------------

    def lookup(self, tokens: TokenSequence, limit: int | None = None) -> Plan:
        """How much of `tokens` could be restored, at most `limit`. Changes nothing."""
        array = self._memo.get(tokens)
        bound = len(array) if limit is None else max(0, min(limit, len(array)))
        return planner.plan(self._tree.walk(array), bound, self._kit.cuttable)

    def pauses(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        """Ascending offsets beyond `start` at which prefill should pause for `put`; none if all layers can be cut."""
        if self._kit.cuttable:
            return ()
        tokens = self._memo.get(prompt.tokens)
        if prompt.head:
            self._heads[PrefixHash().then(tokens[: prompt.head]).digest()] = prompt.head
            if len(self._heads) > _HEADS:
                self._heads.popitem(last=False)
        match = self._tree.walk(tokens)
        return planner.pauses(prompt, match, start, self._policy.recent, self._policy.grid)

    def restore(self, tokens: TokenSequence, plan: Plan) -> Restored:
        """Fresh caches of at most `plan.length` tokens: less, if that has gone since it was planned."""
        array = self._memo.get(tokens)[: plan.length]
        path = self._ready(array, plan.length)
        if not path:
            self._counters.misses += 1
            return Restored(self._kit.new(), 0, 0)
        length = min(path[-1].end, len(array))
        cache, copied = self._kit.build([s.rows for s in path if s.rows is not None], path[-1].checkpoint, length)
        self._use(path)
        path[-1].landed += length == path[-1].end
        self._counters.hits += 1
        self._counters.restored_tokens += length
        self._counters.copied_bytes += copied
        if self._paging is not None:
            self._paging.used(path)
            self._enforce()  # what came from disk takes memory
        return Restored(cache, length, copied)

    def _ready(self, tokens: Tokens, limit: int) -> Sequence[Segment]:
        """The segments to restore from, all in memory now; empty if there is nothing to restore."""
        if self._paging is not None:
            self._paging.forget_lost(self._tree)
        while True:
            match = self._tree.walk(tokens)
            length = planner.plan(match, limit, self._kit.cuttable).length
            path = [segment for segment in match.path if segment.start < length]
            if self._paging is None or self._page_in(self._paging, path):
                return path
            # A file was gone or damaged and is forgotten now: plan again without it.

    def _page_in(self, paging: Paging, path: Sequence[Segment]) -> bool:
        """Reads what is on disk only. False: something could not be read."""
        try:
            for segment in path:
                if segment.rows is None:
                    rows = paging.rows(segment)
                    if rows is None:
                        return False
                    self._fill(segment, rows)
                    self._counters.paged_tokens += segment.length
            if path and not self._kit.cuttable and path[-1].checkpoint is None:
                state = paging.checkpoint(path[-1])
                if state is None:
                    return False
                self._attach(path[-1], state)
            return True
        finally:
            paging.forget_read()

    # --- writing ------------------------------------------------------------

    def put(
        self,
        tokens: TokenSequence,
        cache: Sequence[Any],
        *,
        session: str | None = None,
        one_shot: bool = False,
        seconds_per_token: float = 0.0,
        checkpoint: bool = True,
    ) -> None:
        """Stores what is not stored yet of `cache`, which holds exactly `tokens` (one row, not a batch).

        Args:
            session: the conversation this is an end of.
            one_shot: a side request; goes before anything else when bytes are short.
            seconds_per_token: measured cost of computing the new tokens (0: unknown).
            checkpoint: also save the state of layers that cannot be cut.

        Raises:
            ValueError: the cache holds another number of tokens.
        """
        array = self._memo.get(tokens)
        held = self._kit.length(cache)
        if held and held != len(array):
            raise ValueError(f"the cache holds {held} tokens, but {len(array)} were said to be in it")
        if not len(array):
            return
        try:
            end = self._insert(array, cache, one_shot, seconds_per_token, checkpoint)
        except Unstorable as error:
            self._counters.refused += 1
            log.warning("KV of %d tokens is not stored: %s", len(array), error)
            return
        if session is not None and not one_shot:
            self._sessions.add_end(session, end, self._clock())
        if not self._kit.cuttable:
            for segment in budget.thin_after(end, self._policy):
                self._drop_checkpoint(segment)
                if self._paging is not None:
                    self._paging.thinned(segment)
        if self._paging is not None:
            self._paging.forget_lost(self._tree)
            self._paging.stored([*reversed(list(end.ancestors())), end])
        self._enforce()

    def idle(self) -> None:
        """To be called now and then while nothing runs: hands to the disk thread what its queue had no room for."""
        if self._paging is not None:
            self._paging.write()
            self._paging.write_large()

    def touch(self, session: str) -> None:
        """The conversation is in progress: its protection starts anew."""
        self._sessions.touch(session, self._clock())

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more fit without pushing out a protected conversation. For work that nobody asked for."""
        protected = self._sessions.protected_bytes(self._clock())
        return protected + tokens * self._token_bytes + self._state_bytes <= self._budget

    def estimate(self, tokens: int) -> int:
        """Bytes of KV of so many tokens, judged by what was stored last; 0 before that."""
        return int(tokens * self._token_bytes) + self._state_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """From now on at most so many bytes in memory."""
        self._budget = budget_bytes
        self._enforce()

    def clear(self) -> None:
        """Forgets everything that is in memory only."""
        for segment in self._tree:
            self._ghosts += segment.length if segment.rows is not None else 0
            segment.rows = None
            self._drop_state(segment)
        self._bytes = 0
        self._sessions.clear()
        self._drop_ghosts(0)

    def stats(self) -> StoreStats:
        held = [segment for segment in self._tree if segment.rows is not None]
        checkpoints = [segment.checkpoint_bytes for segment in held if segment.checkpoint is not None]
        counters = {name: getattr(self._counters, name) for name in Counters.__slots__}
        return StoreStats(
            segments=len(held),
            leaves=sum(segment.is_leaf for segment in held),
            bytes=self._bytes,
            budget_bytes=self._budget,
            checkpoints=len(checkpoints),
            checkpoint_bytes=sum(checkpoints),
            ghost_tokens=self._ghosts,
            sessions=len(self._sessions),
            hits=self._counters.hits,
            misses=self._counters.misses,
            evicted=self._counters.evicted_leaves,
            counters=counters,
            disk=self._paging.stats() if self._paging is not None else {},
        )

    def flush_disk(self, timeout: float = 60.0) -> bool:
        """Waits until everything stored so far is on disk. False: it took longer than `timeout` seconds."""
        return self._paging is None or self._paging.flush(timeout)

    def close(self) -> None:
        """Writes what is still to be written and lets go of everything."""
        if self._paging is not None:
            self._paging.flush(20.0)
            self._paging.close()
            self._paging = None
        self._tree = Tree(self._divide)
        self._sessions.clear()
        self._bytes = self._ghosts = 0

    # --- inside: storing -----------------------------------------------------

    def _insert(
        self, tokens: Tokens, cache: Sequence[Any], one_shot: bool, seconds_per_token: float, checkpoint: bool
    ) -> Segment:
        """Adds the path, fills its ghosts from `cache`, returns its end."""
        match = self._tree.walk(tokens)
        want_state = checkpoint and not self._kit.cuttable
        inside = match.length == len(tokens) and match.parted
        if inside and not want_state and match.path[-1].rows is not None:
            # A prefix of what is there, and nothing to attach at its end: no reason to divide a segment.
            self._use(match.path)
            return match.path[-1]
        # Everything that can fail comes before the tree changes.
        state = self._checkpoint(tokens, match, cache) if want_state else None
        first_missing = next((s.start for s in match.path if s.rows is None), match.length)
        joint = next((s.rows for s in reversed(match.path) if s.rows is not None), None)
        if first_missing < len(tokens) and joint is not None:
            self._kit.check_joins(joint, cache)
        path = self._tree.extend(tokens)
        self._ghosts += sum(s.length for s in path if s.start >= match.length)
        for segment in path:
            segment.one_shot = segment.one_shot and one_shot if segment.rows is not None else one_shot
            if segment.rows is None:
                self._fill(segment, self._kit.slice(cache, segment.start, segment.end))
                self._counters.stored_tokens += segment.length
                segment.seconds_per_token = seconds_per_token
        end = path[-1]
        if state is not None and end.checkpoint is None:
            self._attach(end, state)
            if end.end in self._heads.values():
                end.head = chain_of(end).digest() in self._heads
        self._use(path)
        return end

    def _checkpoint(self, tokens: Tokens, match: Match, cache: Sequence[Any]) -> Checkpoint | None:
        """The state to attach at the end of `tokens`; ``None`` if it is there."""
        for segment in reversed(match.path):
            if segment.end <= match.length and segment.checkpoint is not None:
                return None if segment.end == len(tokens) else self._kit.checkpoint(cache, segment.checkpoint)
        return self._kit.checkpoint(cache)

    def _attach(self, segment: Segment, checkpoint: Checkpoint) -> None:
        segment.checkpoint = checkpoint
        self._bytes += checkpoint.hold()
        self._state_bytes = checkpoint.nbytes

    def _fill(self, segment: Segment, rows: Slices) -> None:
        segment.rows = rows
        self._bytes += rows.nbytes
        self._token_bytes = rows.nbytes / segment.length
        self._ghosts -= segment.length

    def _use(self, path: Sequence[Segment]) -> None:
        now = self._clock()
        for segment in path:
            segment.used = now
            segment.uses += 1

    def _divide(self, rows: Slices, at: int) -> tuple[Slices, Slices]:
        self._counters.splits += 1
        return self._kit.cut(rows, at)

    # --- inside: evicting ------------------------------------------------------

    def _enforce(self) -> None:
        """Brings memory back under its limits."""
        now = self._clock()
        if self._ttl:
            self._expire(now - self._ttl)
        if self._bytes > self._budget:
            self._evict(now, lambda: self._bytes > self._budget, thin=not self._kit.cuttable)
        if self._max_leaves:
            excess = sum(s.is_leaf for s in self._tree) - self._max_leaves
            if excess > 0:
                target = self._counters.evicted_leaves + excess
                self._evict(now, lambda: self._counters.evicted_leaves < target, thin=False)
        if self._ghosts > self._ghost_limit:
            self._drop_ghosts(int(self._ghost_limit * 0.9))

    def _expire(self, before: float) -> None:
        """Evicts what was not used since `before`."""
        todo = [s for s in self._tree if s.is_leaf]
        while todo:
            segment = todo.pop()
            if segment.used >= before:
                continue
            above = segment.parent
            self._drop(segment)
            if above is not None and above.is_leaf:
                todo.append(above)

    def _evict(self, now: float, more: Callable[[], bool], thin: bool) -> None:
        """Gives up leaves, and with `thin` checkpoints above them, in the order of their ranks."""
        policy, strengths = self._policy, self._sessions.protection(now, self._budget)
        below = budget.checkpoints_to_end(self._tree, strengths) if thin else {}

        def rank(segment: Segment) -> budget.Rank:
            if segment.is_leaf:
                return budget.rank(segment, strengths, policy, now)
            return budget.checkpoint_rank(segment, below[id(segment)], now)

        queue = [(rank(s), id(s), s) for s in self._tree if s.is_leaf or (thin and s.checkpoint is not None)]
        heapq.heapify(queue)
        while more() and queue:
            before, _, segment = heapq.heappop(queue)
            if not segment.is_leaf and segment.checkpoint is None:
                continue
            here = rank(segment)
            if here > before:  # it has become a leaf, or the checkpoint above it has gone
                heapq.heappush(queue, (here, id(segment), segment))
                continue
            if not segment.is_leaf:
                self._drop_checkpoint(segment)
                continue
            above = segment.parent
            self._drop(segment)
            if above is not None and above.is_leaf:
                heapq.heappush(queue, (rank(above), id(above), above))

    def _drop(self, segment: Segment) -> None:
        """The segment becomes a ghost."""
        self._counters.evicted_leaves += 1
        before = self._bytes
        self._bytes -= segment.row_bytes
        self._ghosts += segment.length
        segment.rows = None
        self._drop_state(segment)
        self._tree.absorb(segment)
        self._counters.evicted_bytes += before - self._bytes

    def _drop_checkpoint(self, segment: Segment) -> None:
        self._counters.thinned_checkpoints += 1
        self._drop_state(segment)

    def _drop_state(self, segment: Segment) -> None:
        if segment.checkpoint is not None:
            self._bytes -= segment.checkpoint.release()
            segment.checkpoint = None

    def _drop_ghosts(self, down_to: int) -> None:
        """Forgets the longest unused ghosts that are not on disk either."""
        queue = [(s.used, id(s), s) for s in self._tree if _forgettable(s)]
        heapq.heapify(queue)
        while queue and self._ghosts > down_to:
            _, _, segment = heapq.heappop(queue)
            above = segment.parent
            self._ghosts -= segment.length
            self._tree.remove(segment)
            if above is not None and above.parent is not None and _forgettable(above):
                heapq.heappush(queue, (above.used, id(above), above))


def _forgettable(segment: Segment) -> bool:
    return segment.is_ghost and not segment.children
