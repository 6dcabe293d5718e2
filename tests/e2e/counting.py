"""How much of a request is new: counted on what the client sent, whatever the server reports.

The lines of a request's tools, system text and messages are compared with those of every earlier request; against the
most similar one, new is what this request has more of. What the model generated (assistant messages) is never new,
unless a client writes down something else instead (`NewTokens.rewritten`). A
text that only moved, and a text that stands behind a changed one, count nothing: recomputing them is the server's loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# What the oracle's chat template puts around a message, and before the answer.
MARKUP = "<|im_start|>user\n<|im_end|>\n"
TOOL_MARKUP = "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
OPENING = "<|im_start|>assistant\n"
_NOT_SHOWN = {"type", "role", "id", "cache_control", "tool_use_id", "tool_call_id", "call_id", "status"}
_GENERATED = {"function_call", "custom_tool_call", "reasoning", "local_shell_call"}
# A user message with this is gone in the next request: it is new in every one.
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_RESULTS = {"tool_result", "function_call_output"}


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value that a prompt would show; numbers and booleans count as markup."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _NOT_SHOWN:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation, in any dialect."""
    given = body.get("messages", body.get("input"))
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])


def generated(message: dict[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") in _GENERATED


def is_opening(body: dict[str, Any]) -> bool:
    """The first request of a conversation: nothing in it was generated."""
    return not any(generated(message) for message in messages_of(body))


def _results(message: dict[str, Any]) -> int:
    """How many tool results a message brings."""
    content = message.get("content")
    if isinstance(content, list) and message.get("role") != "tool":
        return sum(isinstance(part, dict) and part.get("type") in _RESULTS for part in content)
    return int(message.get("role") == "tool" or message.get("type") in _RESULTS)


def _transient(message: dict[str, Any]) -> bool:
    return message.get("role") == "user" and any(TRANSIENT in text for text in _texts(message))


def _lines(body: dict[str, Any], kept: bool = False, rewritten: bool = False) -> Counter[str]:
    """The lines that a prompt shows; with `kept` those that later requests will have too."""
    messages = messages_of(body)
    if kept:
        messages = [message for message in messages if not _transient(message)]
    shown = [body.get("tools"), body.get("system"), body.get("instructions")]
    shown += [message for message in messages if rewritten or not generated(message)]
    lines: Counter[str] = Counter()
    for text in _texts(shown):
        lines.update(text.splitlines(keepends=True))
    for message in messages:
        if rewritten or not generated(message):
            lines.update([TOOL_MARKUP] * _results(message) or [MARKUP])
    return lines


@dataclass
class NewTokens:
    """Remembers every request. `tokens` counts the tokens of a text.

    `rewritten`: the client's assistant messages are not what the model said, so they count like all others.
    """

    tokens: Callable[[str], int]
    seen: list[Counter[str]] = field(default_factory=list)
    rewritten: bool = False

    def count(self, body: dict[str, Any]) -> int:
        """Tokens of `body` that are new; it is then known."""
        lines = _lines(body, rewritten=self.rewritten)
        fewest = min((self._size(lines - earlier) for earlier in self.seen), default=self._size(lines))
        self.seen.append(_lines(body, kept=True, rewritten=self.rewritten))
        return fewest + self.tokens(OPENING)

    def _size(self, lines: Counter[str]) -> int:
        return sum(self.tokens(line) * n for line, n in lines.items())
