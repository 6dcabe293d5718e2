"""Views of tool results: how their text looks when the model writes it into a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from start_llm.core.messages import Message
from start_llm.files.lru import Lru
from start_llm.prompt.reading import digest_of

# "   12\tcode" (cat -n), "12→code" (Claude Code), "12: code", "12 | code"
_BEHIND_NUMBERS = ("\t", "→", ": ", ":", " | ", "|")
_NUMBERED = [
    re.compile(rf"^ *\d+(?:{re.escape(mark)}|{re.escape(mark.rstrip(' '))}$)", re.MULTILINE) for mark in _BEHIND_NUMBERS
]
_MOSTLY = 0.9  # of the lines must begin with a number


class Views:
    """Token sequences of the tool results' other forms; kept, as each turn sends all results again. Thread-safe."""

    def __init__(self, encode: Callable[[str], Sequence[int]], *, escaped: bool, most_tokens: int = 1 << 20) -> None:
        self._encode, self._escaped = encode, escaped
        self._kept: Lru[bytes, list[NDArray[np.int32]]] = Lru(most_tokens, lambda _, views: sum(map(len, views)) + 64)

    def __call__(self, messages: Sequence[Message]) -> list[NDArray[np.int32]]:
        """Oldest first."""
        return [view for message in messages if message.role == "tool" for view in self._of(message.content)]

    def _of(self, text: str) -> list[NDArray[np.int32]]:
        key = digest_of(text)
        views = self._kept.get(key)
        if views is None:
            forms = tool_result_views(text, escaped=self._escaped)
            views = [np.array(self._encode(form), dtype=np.int32) for form in forms]
            self._kept.put(key, views)
        return views


def tool_result_views(text: str, *, escaped: bool) -> list[str]:
    """The forms of a tool result, other than its own, in which an argument of a later call may repeat it.

    `escaped`: the model writes arguments as JSON, so text stands in them with quotes and line ends escaped.
    """
    plain = without_line_numbers(text)
    inner = json.dumps(plain, ensure_ascii=False)[1:-1] if escaped else text
    view = inner if inner != text else plain
    return [view] if view != text else []


def without_line_numbers(text: str) -> str:
    """The text without the numbers that a tool put in front of its lines; unchanged if it did not."""
    lines: Sequence[str] = text.split("\n")
    filled = sum(1 for line in lines if line)
    for numbered in _NUMBERED if filled > 1 else ():
        if len(numbered.findall(text)) >= _MOSTLY * filled:
            return numbered.sub("", text)
    return text
