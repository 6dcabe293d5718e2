"""Brings stored KV back under its limits (bytes, age, ends, ghosts), and says in which order things go."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.rows import is_lent
from start_llm.kvcache.sessions import UNPROTECTED, Sessions, Strength
from start_llm.kvcache.tree import Segment, forgettable
from start_llm.kvcache.types import Checkpoint, StoreConfig

_PACKED_FROM = 0.8  # of the limit of arrays: from there on they are packed, some at a time
_SEARCHED_EACH = 0.01  # of the limit: looking for arrays to pack walks the tree
_STILL_PACKED = 1.25  # of the limit: up to there nothing goes while there is something to pack
_ARRAYS_LEFT = 0.95  # of the limit: evicting ranks the whole tree
_GHOSTS_LEFT = 0.9  # of the limit: forgetting ghosts walks the tree, so it is not done for each one
_LEAST_SECONDS_PER_TOKEN = 1e-4  # where nothing was measured, all tokens cost alike
_TAIL = 3  # checkpoints at a conversation's end where its next request is likely to land
_HEAD = 4  # how likely a new conversation begins with a known system text, against one landing elsewhere
_FAR = 1000, 0  # from a protected end: checkpoints, tokens
# Of each window of tokens one checkpoint is kept to the last. With narrow windows states take much room; with wide ones
# much KV goes at once. Both cost the same where windows are as wide as the square root of a state's size, times this.
_WINDOW = 256
_NEAR = 8192  # tokens from an end; windows are twice as wide with each doubling of that distance

Strengths = dict[int, Strength]
"""Protected segments, by `id`: see `Sessions.protection`."""
Rank = tuple[int, Strength, float]
"""Order in which things go, smallest first: level, strength of protection, value."""


class Eviction:
    """Model thread only.

    Attributes:
        budget_bytes, most_arrays: in memory; may be changed, `enforce` acts on them.
    """

    def __init__(self, kit: LayerKit, resident: ResidentKV, sessions: Sessions, config: StoreConfig) -> None:
        self.budget_bytes, self.most_arrays = config.budget_bytes, config.most_arrays
        self._kit, self._resident, self._sessions, self._config = kit, resident, sessions, config

    def enforce(self, now: float) -> None:
        """Evicts as much as all limits together ask for, and hands the freed memory back to the system."""
        resident, config = self._resident, self._config
        before, most, packing = resident.nbytes, self.most_arrays, False
        if config.ttl_seconds:
            self._expire(now - config.ttl_seconds)
        if resident.nbytes > self.budget_bytes:
            resident.trim(self.budget_bytes)
            self._evict(now, lambda: resident.nbytes > self.budget_bytes)
        if most and resident.arrays > most * _PACKED_FROM:
            packing = resident.pack(int(most * _SEARCHED_EACH) if resident.arrays <= most else 0)
        most = int(most * _STILL_PACKED) if packing else most
        if most and resident.arrays > most:
            few = int(most * _ARRAYS_LEFT)
            self._evict(now, lambda: resident.arrays > few)
        if resident.ghosts > config.ghost_tokens:
            self.forget_ghosts(int(config.ghost_tokens * _GHOSTS_LEFT))
        resident.tidy()
        if resident.nbytes < before:
            self._kit.free_buffers()

    def forget_ghosts(self, down_to: int) -> None:
        """Removes the longest unused ghosts that are not on disk either, until at most so many tokens are left."""
        resident = self._resident
        for segment in sorted(resident.tree, key=lambda s: (s.used, -s.start)):  # children before their parents
            if resident.ghosts <= down_to:
                break
            if forgettable(segment):
                resident.ghosts -= segment.length
                resident.tree.remove(segment)

    def _expire(self, before: float) -> None:
        """Evicts what was not used since `before`."""
        for segment in reversed(list(self._resident.tree)):  # children before their parents
            if segment.is_leaf and segment.used < before and not is_lent(segment.rows):
                self._resident.drop(segment)

    def _evict(self, now: float, more: Callable[[], bool]) -> None:
        """Gives up leaves, and checkpoints above them, in the order of their ranks.

        Checkpoints inside conversations go before KV does. Where a conversation's KV has to go, too, the last one in
        front of it comes back: else what is left of it down to another one would be of no use.
        """
        resident, ends = self._resident, self._sessions.protection(now)
        strengths = whole_paths(resident.tree, ends)
        order = self._order(ends, strengths, now)
        # Of equals the first goes. Not by `id`: that differs between the ranks of one model.
        turns = itertools.count()
        queue = [(order(s), next(turns), s) for s in resident.tree if s.is_leaf or s.checkpoint is not None]
        heapq.heapify(queue)
        given_up: dict[Segment, Checkpoint] = {}
        while more() and queue:
            before, _, segment = heapq.heappop(queue)
            if not segment.is_leaf and segment.checkpoint is None:
                continue
            here = order(segment)
            if here > before:  # it has become a leaf, or the checkpoint above it has gone
                heapq.heappush(queue, (here, next(turns), segment))
            elif segment.checkpoint is not None and not segment.is_leaf:
                given_up[segment] = segment.checkpoint
                resident.drop_checkpoint(segment)
            elif not is_lent(segment.rows) and (above := resident.drop(segment)) is not None:
                if id(above) in strengths:
                    self._bring_back(above, given_up)
                heapq.heappush(queue, (order(above), next(turns), above))

    def _order(self, ends: Strengths, strengths: Strengths, now: float) -> Callable[[Segment], Rank]:
        """Ranks a segment as the tree is when it is asked. `strengths`: of `whole_paths`, for these `ends`."""
        resident, cuttable = self._resident, self._kit.cuttable
        nearest = {} if cuttable else nearest_ends(resident.tree, ends)
        window = int(_WINDOW * math.sqrt(resident.sizes.estimate(0) / max(resident.sizes.token_bytes, 1)))

        def order(segment: Segment) -> Rank:
            if segment.is_leaf:
                return rank(segment, strengths, cuttable, now)
            return checkpoint_rank(segment, strengths, nearest.get(id(segment), _FAR), now, window)

        return order

    def _bring_back(self, end: Segment, given_up: dict[Segment, Checkpoint]) -> None:
        """A conversation ends here now. Its last checkpoint comes back if it is one of those that were `given_up`."""
        place = next((s for s in (end, *end.ancestors()) if s in given_up or s.checkpoint), end)
        if (state := given_up.pop(place, None)) is not None:
            self._resident.attach(place, state)


def value(segment: Segment, now: float) -> float:
    """What losing this leaf costs a byte: (seconds to recompute x uses) / (bytes x age)."""
    seconds = max(segment.seconds_per_token, _LEAST_SECONDS_PER_TOKEN) * segment.length
    return seconds * max(segment.uses, 1) / (max(segment.nbytes, 1) * (now - segment.used + 1.0))


def whole_paths(segments: Iterable[Segment], ends: Strengths) -> Strengths:
    """Of all segments on the paths to protected ends: as strong as the strongest end that stands on them.

    So a conversation that has lost its end goes on losing KV from the end, and no other one begins to.
    """
    strengths = dict(ends)
    for segment in reversed(list(segments)):  # children before their parents
        if (strength := strengths.get(id(segment))) is not None and segment.parent is not None:
            above = id(segment.parent)
            strengths[above] = max(strengths.get(above, strength), strength)
    return strengths


def rank(segment: Segment, strengths: Strengths, cuttable: bool, now: float) -> Rank:
    """Of a leaf. Levels: 0 useless, 1 of side requests only, 2 unprotected, 3 of conversations in progress.

    A leaf without a checkpoint restores nothing in a model that needs one (not `cuttable`).
    """
    strength = strengths.get(id(segment), UNPROTECTED)
    if not cuttable and not segment.has_state:
        level, strength = 0, UNPROTECTED
    elif strength != UNPROTECTED:
        level = 3
    else:
        level = 1 if segment.one_shot else 2
    return level, strength, value(segment, now)


def checkpoint_rank(segment: Segment, strengths: Strengths, nearest: tuple[int, int], now: float, window: int) -> Rank:
    """Of a checkpoint that is not a leaf's, beside the leaves' ranks.

    What losing it costs: the tokens back to the next one above, for each time that a request lands here.
    That is likely near a conversation's end, at the end of a system text, and where it happened before.
    The first go only after all unprotected leaves, a system text's only after the KV of the conversations in progress
    that begin with it: without it, what is left of them may be of no use. All others go before KV of conversations; but
    the first of each window stays as long as the end below it, for the same reason. Windows are wider the further from
    the end they are: a conversation that has lost so much computes so much again, and a part of that more is no great
    loss.

    Args:
        nearest: of `nearest_ends`, for this segment.
        window: tokens of a window at the end.
    """
    next_above = next((above.end for above in segment.ancestors() if above.checkpoint is not None), 0)
    below, tokens = nearest
    likely = segment.landed + 1.0 / (1 + below) + (_HEAD if segment.head else 0)
    seconds = max(segment.seconds_per_token, _LEAST_SECONDS_PER_TOKEN) * (segment.end - next_above)
    worth = seconds * likely / (max(segment.checkpoint_bytes, 1) * (now - segment.used + 1.0))
    strength = strengths.get(id(segment), UNPROTECTED)
    if segment.head:
        return 3, strength, worth if strength == UNPROTECTED else math.inf
    window = max(window, 1) << max(tokens // _NEAR, 1).bit_length() - 1
    if segment.end // window > next_above // window:
        return 3, strength, math.inf
    return 3 if below < _TAIL else 1, UNPROTECTED, worth


def nearest_ends(segments: Iterable[Segment], strengths: Strengths) -> dict[int, tuple[int, int]]:
    """For each segment that a protected end stands on (by `id`): how many checkpoints and tokens lie from it to the
    nearest one, its own not counted."""
    nearest: dict[int, tuple[int, int]] = {}
    for segment in reversed(list(segments)):  # children before their parents
        ways = [
            (nearest[id(child)][0] + (child.checkpoint is not None), nearest[id(child)][1] + child.length)
            for child in segment.children.values()
            if id(child) in nearest
        ]
        if id(segment) in strengths:
            ways = [(0, 0)]
        if ways:
            nearest[id(segment)] = min(ways)
    return nearest


def thin_after(end: Segment, config: StoreConfig) -> list[Segment]:
    """Checkpoints above a new `end` that its conversation has outgrown.

    The most recent ones stay; before them no more than it takes to keep every gap within the grid.
    Stops where the path branches or at a system text's end: what lies above is other conversations' too.
    """
    drop: list[Segment] = []
    marks = [end]
    for above in end.ancestors():
        if sum(child.rows is not None for child in above.children.values()) > 1:
            break
        if above.checkpoint is not None:
            marks.append(above)
        if above.head:
            break
    kept = end
    for index in range(1, len(marks) - 1):
        gap = kept.end - marks[index + 1].end
        if index > config.checkpoints_recent and not marks[index].head and gap <= config.checkpoint_grid:
            drop.append(marks[index])
        else:
            kept = marks[index]
    return drop


def near_end(segment: Segment) -> bool:
    """At most two checkpoints stand between here and a leaf."""
    ways = [(segment, 0)]
    while ways:
        here, passed = ways.pop()
        if here.is_leaf:
            return True
        below = [child for child in here.children.values() if child.rows is not None]
        ways += [(c, passed + (c.checkpoint is not None)) for c in below if passed + (c.checkpoint is not None) < _TAIL]
    return False
