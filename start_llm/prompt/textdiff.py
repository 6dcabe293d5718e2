"""What changed in a text, as the lines that are new and the lines that are gone."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

MAX_LINES = 3000
_AT_ONCE = 150
_ELIDE = 13
_NAME = 100  # characters; a longer line before a fence is no file's name
_ALIKE = 6  # characters, as in "Mode: "
_FENCE = re.compile(r"^`{3,}[\w.+-]*$|^<(?:source|code|pre|codeblock|sourcecode)>$")
_CLOSING = re.compile(r"`{3,}$|</(?:source|code|pre|codeblock|sourcecode)>$")
TAG = re.compile(r"^</?[\w-]+>$")


def diff(old: str, new: str) -> list[str] | None:
    """The lines by which `new` differs from `old`, each place under a line that says where it is in `new` now.

    A place in a file between fences is named by the file. Of lines that begin as before only the new ones are told. Of
    a long run of lines that are gone the first and the last are told. None where the texts are too long to compare.
    """
    before, after = old.split("\n"), new.split("\n")
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    a, b = before[head : len(before) - tail], after[head : len(after) - tail]
    if max(len(a), len(b)) > MAX_LINES:
        return None
    lines: list[str] = []
    places = _Places(after)
    for a1, a2, b1, b2 in _differences(a, b):
        gone, came = a[a1:a2], b[b1:b2]
        place = places.at(head + b1)
        if len(gone) == len(came) and all(map(_begin_alike, gone, came)):
            lines.append(f"{place}, now:")
        elif len(gone) >= _ELIDE:
            lines += [f"{place}:", f"-{gone[0]}", f"(-{len(gone) - 2} more lines, down to)", f"-{gone[-1]}"]
        else:
            lines += [f"{place}:", *(f"-{line}" for line in gone)]
        lines += (f"+{line}" for line in came)
    return lines


def _begin_alike(old: str, new: str) -> bool:
    """A reader sees which line the new one stands for."""
    return _common(old.strip(), new.strip()) >= max(_ALIKE, len(old.strip()) // 4)


class _Places:
    """How a reader finds a line: in the file that it stands in, or in the whole text. Asked in order."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._seen = 0
        self._opened: int | None = None

    def at(self, index: int) -> str:
        for number in range(self._seen, index):
            line = self._lines[number]
            if self._opened is None and _FENCE.match(line):
                self._opened = number
            elif self._opened is not None and _CLOSING.search(line):
                self._opened = None
        self._seen = max(self._seen, index)
        name = self._lines[self._opened - 1].strip().removesuffix(":") if self._opened else ""
        if self._opened is None or not 0 < len(name) <= _NAME:
            return f"line {index + 1}"
        return f"{name}, line {index - self._opened}"


def _differences(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Where `a` and `b` differ: `a[a1:a2]` is `b[b1:b2]` now.

    Long texts are cut at lines that stand once in each, as SequenceMatcher may take the square of their length.
    """
    cuts = _unique_pairs(a, b) if max(len(a), len(b)) > _AT_ONCE else []
    left, right = 0, 0
    for i, j in [*cuts, (len(a), len(b))]:
        one, other = a[left:i], b[right:j]
        if max(len(one), len(other)) > _AT_ONCE:
            yield left, i, right, j
        elif one != other:
            for kind, a1, a2, b1, b2 in SequenceMatcher(None, one, other).get_opcodes():
                if kind != "equal":
                    yield left + a1, left + a2, right + b1, right + b2
        left, right = i + 1, j + 1


def _unique_pairs(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once in `a` and once in `b`: the longest row of them that is in order in both."""
    in_a, in_b = Counter(a), Counter(b)
    place = {line: j for j, line in enumerate(b) if in_b[line] == 1}
    pairs = [(i, place[line]) for i, line in enumerate(a) if in_a[line] == 1 and line in place]
    ends: list[int] = []
    tops: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(tops[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        tops[length : length + 1] = [index]
    row = []
    index = tops[-1] if tops else -1
    while index >= 0:
        row.append(pairs[index])
        index = before[index]
    return row[::-1]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items `a` and `b` begin with alike."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
