"""What is stored, as people look at it: the tree of prefixes without its tokens and without its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_SEGMENTS = 20_000


class StoredSegment(NamedTuple):
    """A run of tokens behind its parent's.

    Attributes:
        parent: index in `StoredTree.segments`, which is smaller than its own; -1: begins a prompt.
        tokens: its length.
        memory: bytes of KV in memory, checkpoints included; 0: none.
        disk: has a copy on disk.
        age: seconds since a request went through here; -1: none has since the start.
        uses: requests that did.
        cost: seconds that computing it took.
    """

    parent: int
    tokens: int
    memory: int
    disk: bool
    age: float
    uses: int
    cost: float


@dataclass(frozen=True, slots=True)
class StoredTree:
    """
    Attributes:
        segments: parents first.
        conversations: (name, index of the segment that one of its turns ends in), the last used one first.
        left_out: segments beyond `MOST_SEGMENTS`.
        token_bytes: of KV for one token, as far as it is known: what a segment on disk takes is told by it.
    """

    segments: tuple[StoredSegment, ...] = ()
    conversations: tuple[tuple[str, int], ...] = ()
    left_out: int = 0
    token_bytes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, one list a field: a tree of 10,000 segments is half as long as with their names."""
        rows = zip(*self.segments, strict=True) if self.segments else ((),) * len(StoredSegment._fields)
        columns: dict[str, list[Any]] = {
            name: list(column) for name, column in zip(StoredSegment._fields, rows, strict=True)
        }
        columns["disk"] = [int(there) for there in columns["disk"]]
        return {
            **columns,
            "conversations": [list(named) for named in self.conversations],
            "left_out": self.left_out,
            "token_bytes": round(self.token_bytes, 1),
        }
