"""Decides how much of a prompt can be restored, and where its prefill should stop. Pure: changes and reads nothing.

The idea: KV of a token depends on all tokens before it and on nothing else. So a prompt can take over any prefix that
equals a stored path, token by token, and the longest one is the best. What limits it is the kind of layer. Layers that
hold a row for each token can be cut anywhere: the prefix ends where the tokens part, or where rows were evicted. Layers
that hold one state of the whole history can be restored only where a checkpoint of it was saved: the prefix ends at the
deepest checkpoint. Hence the second decision: a prefill stops where a later prompt is likely to part from this one
(ends of messages, of the system text, places where prompts parted before), and never leaves a gap wider than the grid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from start_llm.core.prompt import Prompt
from start_llm.kvcache.tree import PrefixMatch
from start_llm.kvcache.types import RestorePlan

_TELLING = 12  # tokens that show people what is stored at a place
_WORTH = 16  # tokens that a restore point at a parting must save


def plan(match: PrefixMatch, limit: int, cuttable: bool) -> RestorePlan:
    """The deepest place at most `limit` tokens deep that every layer can be restored at.

    Args:
        match: the walk of the prompt's tokens.
        cuttable: no layer needs a checkpoint.
    """
    matched = match.length
    restorable = 0
    bound = min(match.length, limit)
    for segment in match.path:
        if segment.is_ghost:
            matched = segment.start
            break
        if segment.has_state and segment.end <= bound:
            restorable = segment.end
    length = min(matched, limit) if cuttable else restorable
    if length >= match.length:
        reason = ""
    elif length >= bound:
        reason = "limit"
    elif length < min(matched, limit):
        reason = "no_checkpoint"
    else:
        reason = "evicted"
    return RestorePlan(length, matched, match.length, reason, _behind(match))


def _behind(match: PrefixMatch) -> tuple[int, ...]:
    """What stands behind the match: how the segment goes on that was left, or else its child that was used last."""
    if not match.path:
        return ()
    last = match.path[-1]
    if match.parted:
        return tuple(last.tokens[match.length - last.start :][:_TELLING].tolist())
    children = list(last.children.values())
    return tuple(max(children, key=lambda child: child.used).tokens[:_TELLING].tolist()) if children else ()


def stops(
    prompt: Prompt, match: PrefixMatch, start: int, recent: int, grid: int, head_grid: int | None = None
) -> tuple[int, ...]:
    """Offsets beyond `start` at which a checkpoint is wanted (for models whose state cannot be cut).

    The end of the tools+system block, the last `recent` message boundaries, before a transient message
    and the generation prompt, where this or an earlier prompt left a stored path, and enough places
    between these that none is further than `grid` tokens from the one before. Message boundaries
    are taken for that where there are any, since that is where histories are cut. In the tools+system block `head_grid`
    stands for `grid`: an agent of the same client may have other tools, and there are no boundaries between them.
    """
    last = len(prompt.tokens) - 1
    wanted = {prompt.system_end, prompt.generation, *(prompt.boundaries[-recent:] if recent else ())}
    if prompt.transient is not None:
        wanted.add(prompt.transient)
    wanted.update(offset for offset in _partings(match) if offset - start >= _WORTH)
    fixed = sorted(offset for offset in wanted if start < offset <= last)
    head = sum(offset <= prompt.system_end for offset in fixed)
    behind = max(start, *fixed[:head]) if head else start
    dense = _fill(fixed[:head], (), start, behind, head_grid or grid)
    return (*dense, *_fill(fixed[head:], prompt.boundaries, behind, last, grid))


def _partings(match: PrefixMatch) -> Iterable[int]:
    """Where sequences were seen to part along this path, this one's own parting included."""
    for segment in match.path:
        if segment.end <= match.length and len(segment.children) > 1 and not segment.has_state:
            yield segment.end
    if match.parted or (match.path and match.path[-1].children and not match.path[-1].has_state):
        yield match.length


def _fill(fixed: list[int], boundaries: tuple[int, ...], start: int, last: int, grid: int) -> Iterable[int]:
    """`fixed` with places added so that no gap is wider than `grid`."""
    at = start
    for stop in dict.fromkeys([*fixed, last]):
        while stop - at > grid:
            index = bisect_right(boundaries, at + grid) - 1
            at = boundaries[index] if index >= 0 and boundaries[index] > at else at + grid
            yield at
        if stop in fixed:
            yield stop
        at = stop
