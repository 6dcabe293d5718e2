"""Server-sent events: how one is written."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


def ping(done: int, total: int) -> bytes:
    """A comment: clients skip it, connections stay open."""
    return f": ping {done}/{total} tokens\n\n".encode()
