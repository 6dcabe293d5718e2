"""The owner of stored KV: finds, restores, stores and evicts.

What a request does here, in order:

    lookup    how much of its tokens is stored          does not change the store
    stops     where its prefill should stop for `put`   does not change the store
    restore   caches that hold the stored KV            marks segments as used, reads files, may evict
    put       at each stop, after the prefill, and     adds segments and checkpoints, may evict
              after the generation
    take_back when the request has ended                the caches' buffers are the tree's, may evict

Contract: all of it is for the model thread, and there are no locks; only `peek` and `snapshot` are for any thread. The
caches of `restore` are the caller's until `take_back`: KV moves into them and is not copied, and `put` from them copies
nothing either. From other caches `put` copies and keeps no reference to them. A plan is no promise: what was evicted
since is not restored. Nothing here knows what tokens mean, or who may see them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from zlib import crc32

from start_llm.core.prompt import Prompt
from start_llm.core.report import StoredTree
from start_llm.kvcache import planner
from start_llm.kvcache.blocks import Tokens, TokenSequence, as_tokens
from start_llm.kvcache.disk.paging import Paging
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.events import KVEvents
from start_llm.kvcache.evict import Eviction, thin_after
from start_llm.kvcache.kinds import held_tokens
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.lending import LentRows
from start_llm.kvcache.resident import ResidentKV, snapshot, use
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.tree import PrefixMatch, Segment
from start_llm.kvcache.types import Checkpoint, Restored, RestorePlan, StoreConfig, StoredEnd, Unstorable

__all__ = ["KVStore", "RestorePlan", "Restored", "StoreConfig"]

log = logging.getLogger(__name__)

_ANSWER_ROOM = 128  # tokens; where an answer begins, rows are not copied at once
_LEAST_GRID = 128  # tokens; a denser one would make chunks of prefill that are too short to be quick
_UNKNOWN_END = StoredEnd()


class KVStore:
    """Stored KV of one model.

    Args:
        kit: cuts and rebuilds the model's caches.
        disk: keeps KV beyond memory and beyond the process; the store closes it.
        listener: is told what is evicted.
        clock: seconds, never going back.

    Attributes:
        resident: what is in memory; only to be looked at.
        lent_rows: what running requests have taken over of it; only to be looked at.
        disk: what is on disk.
    """

    def __init__(
        self,
        kit: LayerKit,
        config: StoreConfig,
        *,
        disk: DiskTier | None = None,
        listener: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kit, self._config, self._clock = kit, config, clock
        self.resident = ResidentKV(kit, listener)
        self.lent_rows = LentRows(kit, self.resident)
        self.disk = Paging(kit, disk or DiskTier(None), self.resident)
        self._sessions = Sessions(config.session_idle_seconds, config.sessions_keep)
        self._eviction = Eviction(kit, self.resident, self._sessions, config)
        self._digested = -1  # the tree, after so many changes,
        self._tree_digest = 0  # has this digest

    # --- reading ------------------------------------------------------------

    def lookup(self, tokens: TokenSequence, limit: int | None = None) -> RestorePlan:
        """How much of `tokens` could be restored, at most `limit`. Does not change the store."""
        array = as_tokens(tokens)
        bound = len(array) if limit is None else max(0, min(limit, len(array)))
        return planner.plan(self.resident.tree.walk(array), bound, self._kit.cuttable)

    def peek(self, tokens: Tokens, limit: int) -> RestorePlan:
        """`lookup` for any thread, without delaying the model thread. Does not change the store. Raises TimeoutError:
        the store is being changed all the time."""
        return self.resident.tree.read_consistently(lambda: self.lookup(tokens, limit))

    def snapshot(self) -> StoredTree:
        """The whole tree, for people. Any thread; does not change the store. Raises TimeoutError, like `peek`."""
        tree, token_bytes = self.resident.tree, self.resident.sizes.token_bytes
        return tree.read_consistently(lambda: snapshot(tree, self._sessions.ends(), self._clock(), token_bytes))

    def stops(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        """Ascending offsets beyond `start` at which prefill should stop for `put`; none if all layers can be cut."""
        if self._kit.cuttable:
            return ()
        match = self.resident.tree.walk(as_tokens(prompt.tokens))
        config = self._config
        # As many as take no more than the KV of the tools+system block itself.
        dense = int(self.resident.sizes.estimate(0) / max(self.resident.sizes.token_bytes, 1))
        head_grid = min(max(dense, _LEAST_GRID), config.checkpoint_grid)
        found = planner.stops(prompt, match, start, config.checkpoints_recent, config.checkpoint_grid, head_grid)
        return tuple(place for place in found if prompt.image_at(place) is None)

    def restore(self, tokens: TokenSequence, plan: RestorePlan) -> Restored:
        """Caches of at most `plan.length` tokens: less, if that has gone since it was planned.

        They have room for all of `tokens`, so that computing the rest copies no rows again, and for little more. The
        caller writes behind what is stored and then calls `take_back`, in any case.
        """
        whole = as_tokens(tokens)
        array = whole[: plan.length]
        path = self._ready(array, plan.length)
        if not path:
            return Restored(self.lent_rows.lend((), None, 0, 0)[0], 0, 0)
        length = min(path[-1].end, len(array))
        checkpoint, spare = path[-1].checkpoint, len(whole) - length + _ANSWER_ROOM
        use(path, self._clock())
        path[-1].landed += length == path[-1].end
        self.disk.used(path)
        cache, copied = self.lent_rows.lend(path, checkpoint, length, spare)
        with ExitStack() as failed:
            failed.callback(self.lent_rows.take_back, cache)  # the caller never gets these caches
            self._kit.make_room(cache, spare)
            self.resident.counters["copied_bytes"] += copied
            self._eviction.enforce(self._clock())  # what came from disk takes memory
            failed.pop_all()
        return Restored(cache, length, copied)

    def _ready(self, tokens: Tokens, limit: int) -> Sequence[Segment]:
        """The segments to restore from, all in memory now; empty if there is nothing to restore."""
        self.disk.forget_lost()
        while True:
            match = self.resident.tree.walk(tokens)
            length = planner.plan(match, limit, self._kit.cuttable).length
            path = [segment for segment in match.path if segment.start < length]
            if self.disk.read(path):
                return path
            # A file was gone or damaged and is forgotten now: plan again without it.

    def take_back(self, cache: Sequence[Any], *, valid: bool = True) -> None:
        """The request of these caches has ended: see `LentRows.take_back`."""
        self.lent_rows.take_back(cache, valid=valid)
        self._eviction.enforce(self._clock())

    # --- writing ------------------------------------------------------------

    def put(self, tokens: TokenSequence, cache: Sequence[Any], about: StoredEnd = _UNKNOWN_END) -> None:
        """Stores what is not stored yet of `cache`, which holds exactly `tokens` (one row, not a batch).

        Raises:
            ValueError: the cache holds another number of tokens.
        """
        array = as_tokens(tokens)
        counted = held_tokens(cache)
        if counted and counted != len(array):
            raise ValueError(f"the cache holds {counted} tokens, but {len(array)} were said to be in it")
        if not len(array):
            return
        try:
            end = self._insert(array, cache, about)
            for length, layers in about.states:
                place = self.resident.tree.extend(array[:length])[-1]
                if place.rows is not None and place.checkpoint is None:
                    self.resident.attach(place, self._kit.checkpoint(layers))
        except Unstorable as error:
            self.resident.counters["refused"] += 1
            log.warning("KV of %d tokens is not stored: %s", len(array), error)
            return
        end.head = end.head or about.system_end
        if about.session is not None and not about.one_shot:
            self._sessions.add_end(
                about.session, end, self._clock(), owner=about.owner, answered=about.answered, calls=about.calls
            )
        # Not while the prompt is computed: where its system text ends is not known yet.
        for segment in thin_after(end, self._config) if about.answered and not self._kit.cuttable else ():
            self.resident.drop_checkpoint(segment)
            self.disk.thinned(segment)
        self.disk.forget_lost()
        self.disk.stored([*reversed(list(end.ancestors())), end])
        self._eviction.enforce(self._clock())

    def _insert(self, tokens: Tokens, cache: Sequence[Any], about: StoredEnd) -> Segment:
        """Adds the path, fills its ghosts from `cache`, returns its end. Unstorable: nothing has changed."""
        resident = self.resident
        want_state = about.checkpoint and not self._kit.cuttable
        match = resident.tree.walk(tokens)
        if not want_state and match.length == len(tokens) and match.parted and match.path[-1].rows is not None:
            # A prefix of what is there, and nothing to attach at its end: no reason to divide a segment.
            use(match.path, self._clock())
            return match.path[-1]
        # Everything that can fail comes before the tree changes.
        state = _new_state(self._kit, tokens, match, cache) if want_state else None
        filled = [segment.rows for segment in match.path if segment.rows is not None]
        if filled and (match.length < len(tokens) or len(filled) < len(match.path)):
            self._kit.check_joins(filled[-1], cache)
        path = resident.tree.extend(tokens)
        self._fill(path, match.length, cache, about)
        end = path[-1]
        if state is not None and end.checkpoint is None:
            resident.attach(end, state)
        use(path, self._clock())
        return end

    def _fill(self, path: Sequence[Segment], known: int, cache: Sequence[Any], about: StoredEnd) -> None:
        """`known`: tokens of the path that the tree had before."""
        self.resident.ghosts += sum(s.length for s in path if s.start >= known)
        for segment in path:
            is_new = segment.rows is None
            segment.one_shot = about.one_shot and (segment.one_shot or is_new)
            if is_new:
                self.lent_rows.fill_from(segment, cache)
                self.resident.counters["stored_tokens"] += segment.length
                segment.seconds_per_token = about.seconds_per_token

    def forget(self, tokens: TokenSequence, length: int) -> None:
        """Gives up what is stored of `tokens` behind their first `length`, and all that stands on it; on disk too."""
        for segment in self.resident.tree.below(as_tokens(tokens), length):
            self.disk.given_up(segment)
            self.resident.drop(segment)

    def idle(self) -> None:
        """To be called now and then while nothing runs.

        Hands to the disk thread what its queue had no room for, and evicts what has outlived its time.
        """
        self.disk.find()
        self.disk.write(resting=True)
        self._eviction.enforce(self._clock())

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more fit without pushing out a protected conversation. For work that nobody asked for."""
        protected = self._sessions.protected_bytes(self._clock())
        return protected + self.resident.sizes.estimate(tokens) <= self._eviction.budget_bytes

    def learn(self, tokens: int, cache: Sequence[Any]) -> None:
        """`cache` is a sample of so many tokens: what rows will take is judged by it. Nothing is stored. Raises
        Unstorable: a layer of it cannot be stored."""
        if not self._kit.cuttable:
            self.resident.sizes.learn_state(self._kit.checkpoint(cache))
        rows = self._kit.slice(cache, 0, tokens)
        self.resident.sizes.learn(rows, rows.forms)

    def set_budget(self, budget_bytes: int | None, others: int = 0, stores: int = 1) -> None:
        """From now on at most so many bytes in memory; ``None``: as before.

        The device's room for arrays is for so many `stores`, and the `others` hold so many: this one may have an equal
        part, or what these leave, if that is more. Without bytes that is acted on when something is stored, or at rest.
        """
        most = self._config.most_arrays
        self._eviction.most_arrays = max(most // stores, most - others)
        if budget_bytes is not None:
            self._eviction.budget_bytes = budget_bytes
            self._eviction.enforce(self._clock())

    def clear(self) -> None:
        """Forgets everything that is in memory only."""
        self.resident.drop_all()
        self._sessions.clear()
        self._eviction.forget_ghosts(0)
        self._kit.free_buffers()

    def stats(self) -> dict[str, int]:
        """Sizes of what is in memory, `resident.COUNTERS`, and as ``disk_...`` figures of its disk tier if any.

        `leaves` are ends of conversations, `checkpoints` restore points of layers that cannot be cut, `ghost_tokens`
        those that are remembered without KV. `bytes` leaves out what running requests have taken over; `held_bytes` has
        it: see `LentRows.nbytes`; `used_bytes` is what stored tokens take of that.
        """
        resident = self.resident
        segments = [segment for segment in resident.tree if segment.rows is not None]
        checkpoints = [segment.checkpoint_bytes for segment in segments if segment.checkpoint is not None]
        return {
            "segments": len(segments),
            "tokens": sum(segment.length for segment in segments),
            "leaves": sum(segment.is_leaf for segment in segments),
            "bytes": resident.nbytes,
            "held_bytes": resident.nbytes + self.lent_rows.nbytes,
            "used_bytes": sum(segment.nbytes for segment in segments),
            "budget_bytes": self._eviction.budget_bytes,
            "arrays": resident.arrays,
            "checkpoints": len(checkpoints),
            "checkpoint_bytes": sum(checkpoints),
            "ghost_tokens": resident.ghosts,
            "sessions": len(self._sessions),
            **resident.counters,
            **{f"disk_{name}": value for name, value in self.disk.stats().items()},
        }

    def digest(self) -> int:
        """A number that is the same for two stores that hold the same and go on in the same way."""
        resident = self.resident
        if resident.tree.changes != self._digested:
            self._digested = resident.tree.changes
            segments = [(s.start, s.length, s.rows is None, s.checkpoint is None, s.nbytes) for s in resident.tree]
            self._tree_digest = crc32(repr(segments).encode())
        counted = (*resident.counters.values(), resident.nbytes, self.lent_rows.nbytes, resident.ghosts)
        return crc32(repr((*counted, len(self._sessions), self._eviction.budget_bytes)).encode(), self._tree_digest)

    def close(self) -> None:
        """Writes what is still to be written and lets go of everything."""
        self.disk.close()
        self.clear()


def _new_state(kit: LayerKit, tokens: Tokens, match: PrefixMatch, cache: Sequence[Any]) -> Checkpoint | None:
    """The state to attach at the end of `tokens`; ``None`` if it is there."""
    for segment in reversed(match.path):
        if segment.end <= match.length and segment.checkpoint is not None:
            return None if segment.end == len(tokens) else kit.checkpoint(cache, segment.checkpoint)
    return kit.checkpoint(cache)
