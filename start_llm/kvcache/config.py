"""The fixed settings of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """
    Attributes:
        budget_bytes: most bytes of KV in memory, at first (`KVStore.set_budget` changes it).
        checkpoints_recent: message boundaries near the end that keep a checkpoint.
        checkpoint_grid: most tokens between two restore points.
        ttl_seconds: KV unused for so long leaves memory (0: never).
        session_idle_seconds: a conversation idle for longer loses its protection (0: never).
        sessions_keep: protected ends of one conversation.
        max_leaves: most conversation ends (0: bounded by bytes only).
        ghost_tokens: most tokens remembered after their KV was evicted.
    """

    budget_bytes: int
    checkpoints_recent: int = 8
    checkpoint_grid: int = 1024
    ttl_seconds: float = 0
    session_idle_seconds: float = 1800
    sessions_keep: int = 2
    max_leaves: int = 0
    ghost_tokens: int = 4_000_000
