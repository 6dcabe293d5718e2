"""How much of a request is new: counted on what the client sent, whatever the server reports.

A line of text is new if no earlier request had it in its tools, its system text or its messages and it was not
generated. An assistant message was generated, so none of its lines is new. Every message costs a few tokens of markup,
new if the conversation has grown by it. A text that only moved, and a prefix that only changed, count nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MARKUP_TOKENS = 6


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value; numbers and booleans count as markup."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in {"type", "role", "id", "cache_control", "tool_use_id", "tool_call_id", "call_id", "status"}:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages", body.get("input"))
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])


def _generated(message: dict[str, Any]) -> bool:
    kinds = {"function_call", "custom_tool_call", "reasoning", "local_shell_call"}
    return message.get("role") == "assistant" or message.get("type") in kinds


@dataclass
class Counter:
    """Remembers every line that was ever sent. `tokens` counts the tokens of a text."""

    tokens: Callable[[str], int]
    lines: set[str] = field(default_factory=set)
    longest: int = 0

    def new_tokens(self, body: dict[str, Any]) -> int:
        """Tokens of `body` that are new, which are then known."""
        messages = _messages(body)
        heads = [body.get("tools"), body.get("system"), body.get("instructions")]
        texts = [text for head in heads for text in _texts(head)]
        texts += [text for message in messages if not _generated(message) for text in _texts(message)]
        known = [text for message in messages if _generated(message) for text in _texts(message)]
        count = 0
        for text in texts:
            for line in text.splitlines(keepends=True):
                if line not in self.lines:
                    self.lines.add(line)
                    count += self.tokens(line)
        for text in known:
            self.lines.update(text.splitlines(keepends=True))
        grown = max(0, len(messages) - self.longest)
        self.longest = max(self.longest, len(messages))
        return count + MARKUP_TOKENS * grown


def body_size(body: dict[str, Any]) -> int:
    return len(json.dumps(body))
