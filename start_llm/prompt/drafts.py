"""Views of tool results: how their text looks when the model writes it into a call. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# "   12\tcode" (cat -n), "12→code" (Claude Code), "12: code", "12 | code"
_BEHIND_NUMBERS = ("\t", "→", ": ", ":", " | ", "|")
_NUMBERED = [
    re.compile(rf"^ *\d+(?:{re.escape(mark)}|{re.escape(mark.rstrip(' '))}$)", re.MULTILINE) for mark in _BEHIND_NUMBERS
]
_MOSTLY = 0.9  # of the lines must begin with a number


def tool_result_views(text: str, *, escaped: bool) -> list[str]:
    """The forms of a tool result, other than its own, in which an argument of a later call may repeat it.

    Args:
        escaped: the model writes arguments as JSON, so text stands in them with quotes and line ends escaped.
    """
    plain = without_line_numbers(text)
    views = [] if plain == text else [plain]
    if escaped:
        inner = json.dumps(plain, ensure_ascii=False)[1:-1]
        if inner != text:
            views = [inner]
    return views


def without_line_numbers(text: str) -> str:
    """The text without the numbers that a tool put in front of its lines; unchanged if it did not."""
    lines: Sequence[str] = text.split("\n")
    filled = sum(1 for line in lines if line)
    for numbered in _NUMBERED if filled > 1 else ():
        if len(numbered.findall(text)) >= _MOSTLY * filled:
            return numbered.sub("", text)
    return text
