"""What a running server has loaded, for people."""

from __future__ import annotations

from start_llm.models.device import GIB
from start_llm.models.servers import Card


def state_of(card: Card) -> tuple[str, str]:
    """(state, KV), for people."""
    details = card["details"]
    kv = details.get("kv_bytes") or 0
    pinned = ", pinned" if details.get("pinned") else ""
    return f"{details.get('state', '-')}{pinned}", f"{kv / GIB:.2f} GiB" if details.get("state") == "ready" else "-"
