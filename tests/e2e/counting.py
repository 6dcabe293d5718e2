"""How much of a request is new: counted on what the client sent, whatever the server reports.

The lines of a request's tools, system text and messages are compared with those of every earlier request; against the
most similar one, new is what this request has more of. White space at a line's end makes no difference. What the model
generated (assistant messages) is never new, however its client writes it down. A text that only moved, and a text that
stands behind a changed one, count nothing: recomputing them is the server's loss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.oracle.build import MARKS, SPECIAL, make_tokenizer

# What the oracle's chat template puts around a message, and before the answer.
MARKUP = "<|im_start|>user\n<|im_end|>\n"
TOOL_MARKUP = "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
OPENING = "<|im_start|>assistant\n"
# Behind the answer before, whose last token ends it.
CLOSING = "\n"
_NOT_SHOWN = {"type", "role", "id", "cache_control", "tool_use_id", "tool_call_id", "call_id", "status"}
_GENERATED = {"function_call", "custom_tool_call", "reasoning", "local_shell_call", "tool_search_call"}
# A user message with this is gone in the next request: it is new in every one.
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
# Assistant messages that aider itself writes behind its own: nobody generated them.
_MADE_UP = re.compile(r"Ok\.|Ok, (?:any changes I propose|I won't try and edit|I will use) .*")
# Names of control tokens in what a client sends are letters to the model (`prompt.guard`).
_CUTS = re.compile("(?<=<)(?=" + "|".join(re.escape(name[1:]) for name in (*SPECIAL, *MARKS)) + ")")
_RESULTS = {"tool_result", "function_call_output", "custom_tool_call_output", "tool_search_output"}


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
    made_up = isinstance(message.get("content"), str) and _MADE_UP.fullmatch(message["content"])
    return (message.get("role") == "assistant" and not made_up) or message.get("type") in _GENERATED


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


@dataclass(frozen=True)
class _Part:
    """Lines that a prompt shows together, and what its template puts around them."""

    lines: tuple[str, ...]
    markup: str = ""

    @property
    def size(self) -> int:
        return sum(len(line) + 1 for line in self.lines)


def _parts(body: dict[str, Any], kept: bool = False) -> list[_Part]:
    """What a prompt shows; with `kept` what later prompts will show too."""
    parts = [_Part(_lines(body.get(name))) for name in ("tools", "system", "instructions")]
    for message in messages_of(body):
        if not generated(message) and not (kept and _transient(message)):
            parts.append(_Part(_lines(message) or ("",), TOOL_MARKUP * _results(message) or MARKUP))
    return parts


def _lines(value: Any) -> tuple[str, ...]:
    return tuple(
        line.rstrip() + "\n" * line.endswith("\n") for text in _texts(value) for line in text.splitlines(keepends=True)
    )


@dataclass
class NewTokens:
    """Remembers every request. `tokens` counts the tokens of a text."""

    tokens: Callable[[str], int]
    seen: list[Counter[str]] = field(default_factory=list)

    @classmethod
    def of_the_oracle(cls) -> NewTokens:
        tokenizer = make_tokenizer()
        return cls(cache(lambda text: len(tokenizer.encode(text).ids)))

    def count(self, body: dict[str, Any]) -> int:
        """Tokens of `body` that are new; it is then known."""
        parts = _parts(body)
        fewest = min(self._new(parts, earlier) for earlier in (self.seen or [Counter()]))
        self.seen.append(Counter(line for part in _parts(body, kept=True) for line in part.lines))
        return fewest + self.tokens(OPENING) + (0 if is_opening(body) else self.tokens(CLOSING))

    def _new(self, parts: list[_Part], earlier: Counter[str]) -> int:
        """Against one earlier request. A message that is new, but for lines like others, has its markup anew."""
        left = Counter(earlier)
        count = 0
        for part in parts:
            new = []
            for line in part.lines:
                left[line] -= 1
                if left[line] < 0:
                    new.append(line)
            count += sum(self.tokens(piece) for line in new for piece in _CUTS.split(line))
            count += self.tokens(part.markup) * (4 * sum(len(line) + 1 for line in new) > 3 * part.size)
        return count
