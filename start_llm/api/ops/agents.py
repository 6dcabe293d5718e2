"""Which agent a request seems to come from. For people who look at figures; nothing is decided by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from start_llm.core.messages import Message
from start_llm.prompt.clients import UNKNOWN, Clients

_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,39}")
_BUILT_IN = Clients()
_SIGNS = {
    "pi": re.compile(r"\b(operating|running) inside pi\b"),
    "opencode": re.compile(r"^You are opencode\b", re.IGNORECASE),
    "cline": re.compile(r"^You are Cline\b"),
}
"""What the system texts of agents without rules of their own begin with; most send their library's User-Agent."""
_SIGN_CHARS = 500


def agent_of(messages: Sequence[Message], headers: Mapping[str, str]) -> str:
    """By its system text, else the product that its ``User-Agent`` names first; ``other`` if neither says anything."""
    known = _BUILT_IN.of(messages)
    if known is not UNKNOWN:
        return known.name.replace("_", " ")
    head = messages[0].content[:_SIGN_CHARS] if messages and messages[0].role == "system" else ""
    if signed := next((name for name, sign in _SIGNS.items() if sign.search(head)), None):
        return signed
    agent = headers.get("User-Agent", "").strip()
    if agent.startswith("Mozilla/"):
        return "browser"
    product = _PRODUCT.match(agent.partition("/")[0])
    return product[0].strip() if product else "other"
