"""What changed in a block of text, as the lines that are new and the lines that are gone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

MAX_LINES = 3000
_NAME = 60
_SHORT_NAME = 24
_SENTENCE = re.compile(r"^.{8,60}?[.:](?=\s|$)")
_TAG = re.compile(r"^<[/\w-]+>$")
_FENCE = re.compile(r"^(`{3,}|<(?:source|code|pre|codeblock|sourcecode)>)[\w.+-]*$")


def name_of(text: str, limit: int = _NAME) -> str:
    """The beginning of a block's first line, by which a reader finds it."""
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not _TAG.match(line)), "")
    if sentence := _SENTENCE.match(first):
        first = sentence.group()[:-1]
    return first if len(first) <= limit else first[:limit].rsplit(" ", 1)[0].rstrip(" ,.;:")


def changes(old: str, new: str, neighbours: int) -> str | None:
    """The lines by which `new` differs from `old`, with `neighbours` lines around them, under a line that says where.

    A place inside a fenced file is named by the file and the line in it, any other by the block's first line and the
    line in the block, as they are numbered now. Without neighbours, a line that is gone may stand for the number. None
    where the texts are too long to compare.
    """
    before, after = old.split("\n"), new.split("\n")
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    start = max(0, head - neighbours)
    a = before[start : min(len(before), len(before) - tail + neighbours)]
    b = after[start : min(len(after), len(after) - tail + neighbours)]
    if max(len(a), len(b)) > MAX_LINES:
        return None
    places = _places(after)
    lines: list[str] = []
    whole, named = name_of(new, _NAME if neighbours else _SHORT_NAME), ""
    for group in SequenceMatcher(None, a, b).get_grouped_opcodes(neighbours):
        first = next(code for code in group if code[0] != "equal")
        index = min(start + first[3], len(places) - 1)
        name, number = places[index] or (whole, index + 1)
        gone = a[first[1] : first[2]]
        if not neighbours and gone and before.count(gone[0]) == 1:
            # A line that stood there once says where.
            lines.append("@@" if name == named else f"{name}:")
        else:
            lines.append(f"line {number}:" if name == named else f"{name}, line {number}:")
        named = name
        for kind, a1, a2, b1, b2 in group:
            if kind == "equal":
                lines += (f" {line}" for line in a[a1:a2])
            else:
                lines += (f"-{line}" for line in a[a1:a2])
                lines += (f"+{line}" for line in b[b1:b2])
    return "\n".join(lines)


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items `a` and `b` begin with alike."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def _places(lines: Sequence[str]) -> list[tuple[str, int] | None]:
    """For every line the fenced file in which it stands and its number there."""
    places: list[tuple[str, int] | None] = []
    closing, name, number = "", "", 0
    for index, line in enumerate(lines):
        if closing:
            number += 1
            places.append((name, number))
            if line.endswith(closing):
                closing = ""
            continue
        opened = _FENCE.match(line)
        places.append(None)
        if opened is not None and index and lines[index - 1].strip():
            mark = opened.group(1)
            closing = mark.replace("<", "</") if mark.startswith("<") else mark
            name, number = name_of(lines[index - 1]), 0
    return places
