"""Numbers of a conversation's images, by content: the same image has the same number in every request.

The table that IMAGE_MAP=on appends to answers keeps the numbers when a client has dropped the images themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

HEAD = "<!-- start_llm:images -->\n| Image | Filename |\n|-------|----------|\n"
_TABLE = re.compile(re.escape(HEAD) + r"((?:\|[^\n]*\|(?:\n|$))+)")
_ROW = re.compile(r"\| ([1-9]\d{0,5}) \| image_([0-9a-f]{8})(?:\.\w{1,8})? \|")
SHORT = 8
"""Hexadecimal digits of an identity that a made-up file name carries."""


def numbered(identities: Iterable[str], texts: Sequence[str]) -> dict[str, int]:
    """The number of every image, in the conversation's order; tables in its answers' `texts` say which are given."""
    given = numbers_told(texts)
    numbers: dict[str, int] = {}
    last = max(given.values(), default=0)
    for identity in dict.fromkeys(identities):
        numbers[identity] = given.get(identity[:SHORT]) or last + 1
        last = max(last, numbers[identity])
    return numbers


def numbers_told(texts: Iterable[str]) -> dict[str, int]:
    """By the first digits of their identities: what tables in `texts` say. No number is two images'."""
    given: dict[str, int] = {}
    taken: set[int] = set()
    for text in texts:
        for table in _TABLE.finditer(text):
            for row in filter(None, map(_ROW.fullmatch, table[1].splitlines())):
                short, number = row[2], int(row[1])
                if short not in given and number not in taken:
                    given[short] = number
                    taken.add(number)
    return given


def table(numbers: Mapping[int, str]) -> str:
    """The table of `numbers` (number: file name), to stand at the end of an answer."""
    return HEAD + "\n".join(f"| {number} | {name} |" for number, name in sorted(numbers.items()))


def without_table(text: str, known: Iterable[str]) -> str:
    """`text` without a table at its end whose images are all among `known` (first digits of identities).

    A table with anything else in it stays: the model is shown all that was sent.
    """
    tables = list(_TABLE.finditer(text))
    if not tables or text[tables[-1].end() :].strip():
        return text
    found = tables[-1]
    rows = [_ROW.fullmatch(line) for line in found[1].splitlines()]
    images = set(known)
    ours = all(row is not None and row[2] in images for row in rows)
    return text[: found.start()].rstrip() if ours else text
