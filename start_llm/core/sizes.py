"""Sizes as people read them."""

from __future__ import annotations


def as_size(count: float) -> str:
    """In thousands, as disks and hubs count: ``16.4 GB`` are 16.4 x 10^9 bytes. The page does it alike (``dom.js``)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
