"""Which agent a request seems to come from. For people who look at figures; nothing is decided by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from start_llm.core.messages import Message
from start_llm.prompt.clients import UNKNOWN, Clients

_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,39}")
_BUILT_IN = Clients()


def agent_of(messages: Sequence[Message], headers: Mapping[str, str]) -> str:
    """By its system text, else the product that its ``User-Agent`` names first; ``other`` if neither says anything."""
    known = _BUILT_IN.of(messages)
    if known is not UNKNOWN:
        return known.name.replace("_", " ")
    agent = headers.get("User-Agent", "").strip()
    if agent.startswith("Mozilla/"):
        return "browser"
    product = _PRODUCT.match(agent.partition("/")[0])
    return product[0].strip() if product else "other"
