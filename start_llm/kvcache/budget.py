"""What to give up when stored KV outgrows its bytes: decisions only, the store acts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from start_llm.kvcache.tree import Segment

Strengths = dict[int, tuple[int, float]]
"""Protected ends, by `id`: see `Sessions.protection`."""

_LEAST_SECONDS_PER_TOKEN = 1e-4  # where nothing was measured, all tokens cost alike
_UNPROTECTED = (0, 0.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """Fixed settings of the eviction.

    Attributes:
        cuttable: no layer needs checkpoints.
        recent: checkpoints near a conversation's end that thinning leaves alone at first.
        grid: most tokens between two restore points.
    """

    cuttable: bool
    recent: int
    grid: int


def value(segment: Segment, now: float) -> float:
    """What losing this leaf costs a byte: (seconds to recompute x uses) / (bytes x age)."""
    seconds = max(segment.seconds_per_token, _LEAST_SECONDS_PER_TOKEN) * segment.length
    return seconds * max(segment.uses, 1) / (max(segment.nbytes, 1) * (now - segment.used + 1.0))


def rank(segment: Segment, strengths: Strengths, policy: Policy, now: float) -> tuple[int, tuple[int, float], float]:
    """Order in which leaves go, smallest first: useless ones, side requests, the unprotected, then conversations.

    A leaf without a checkpoint restores nothing in a model that needs one.
    """
    strength = strengths.get(id(segment), _UNPROTECTED)
    if strength != _UNPROTECTED:
        level = 3
    elif not policy.cuttable and segment.checkpoint is None:
        level = 0
    else:
        level = 1 if segment.one_shot else 2
    return level, strength, value(segment, now)


def thin_after(end: Segment, policy: Policy) -> list[Segment]:
    """Checkpoints above a new `end` that its conversation has outgrown.

    The most recent ones stay; before them no more than it takes to keep every gap within the grid.
    Stops where the path branches: what lies above is other conversations' too.
    """
    drop: list[Segment] = []
    marks = [end]
    for above in end.ancestors():
        if _branches(above):
            break
        if above.checkpoint is not None:
            marks.append(above)
    kept = end
    for index in range(1, len(marks) - 1):
        if index > policy.recent and kept.end - marks[index + 1].end <= policy.grid:
            drop.append(marks[index])
        else:
            kept = marks[index]
    return drop


def thin_under_pressure(segments: Iterable[Segment], policy: Policy) -> Iterator[Segment]:
    """Interior checkpoints to give up, least painful first; the caller drops each as it comes and stops when it fits.

    Six passes, each with a grid twice as wide and half as many recent ones spared; in each the longest unused first.
    """
    holders = sorted((s for s in segments if s.checkpoint is not None), key=lambda s: s.used)
    grid, recent = policy.grid, policy.recent
    for _ in range(6):
        for segment in holders:
            if segment.checkpoint is None or segment.is_leaf:
                continue
            below, depth = _next_below(segment, recent)
            if depth >= recent and below - _next_above(segment) <= grid:
                yield segment
        grid, recent = grid * 2, recent // 2


def _branches(segment: Segment) -> bool:
    return sum(child.rows is not None for child in segment.children.values()) > 1


def _next_above(segment: Segment) -> int:
    return next((above.end for above in segment.ancestors() if above.checkpoint is not None), 0)


def checkpoints_below(segment: Segment, enough: int) -> int:
    """The fewest checkpoints between a segment and a leaf below it, not counted beyond `enough`."""
    if segment.is_leaf or segment.rows is None:
        return 0
    return _next_below(segment, enough)[1]


def _next_below(segment: Segment, enough: int) -> tuple[int, int]:
    """The farthest of the next checkpoints on the ways down, and the fewest checkpoints to a leaf (or `enough`)."""
    farthest, fewest = segment.end, 1 << 30
    todo = [(child, 0) for child in segment.children.values() if child.rows is not None]
    while todo:
        here, count = todo.pop()
        if here.checkpoint is not None:
            if count == 0:
                farthest = max(farthest, here.end)
            count += 1
        below = [child for child in here.children.values() if child.rows is not None]
        if not below or count > enough:
            fewest = min(fewest, count)
        else:
            todo.extend((child, count) for child in below)
    return farthest, fewest
