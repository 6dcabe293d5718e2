"""What the store counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounters:
    """Events since the start."""

    hits: int = 0
    misses: int = 0
    stored_tokens: int = 0
    restored_tokens: int = 0
    copied_bytes: int = 0
    paged_tokens: int = 0
    evicted_leaves: int = 0
    evicted_bytes: int = 0
    thinned_checkpoints: int = 0
    splits: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot.

    Attributes:
        segments: segments with KV in memory.
        leaves: those without such children: conversation ends.
        bytes: KV in memory, checkpoints included.
        checkpoints, checkpoint_bytes: restore points of layers that cannot be cut.
        ghost_tokens: tokens remembered without KV.
        sessions: conversations known.
        counters: name to value, see `StoreCounters`.
        disk: the same of the disk tier, empty if there is none.
    """

    segments: int
    leaves: int
    bytes: int
    budget_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    ghost_tokens: int
    sessions: int
    hits: int
    misses: int
    evicted: int
    counters: dict[str, int]
    disk: dict[str, int]
