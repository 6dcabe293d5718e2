"""Numbers of a conversation's images, by content: the same image has the same number in every request.

The table that IMAGE_MAP=on appends to answers keeps the numbers when a client has dropped the images themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

HEAD = "<!-- start_llm:images -->\n| Image | Filename |\n|-------|----------|\n"
_TABLE = re.compile(re.escape(HEAD) + r"((?:\|[^\n]*\|(?:\n|$))+)")
_ROW = re.compile(r"\|\s*(\d{1,6})\s*\|\s*image_([0-9a-f]{8})[.\s|]")
SHORT = 8
"""Hexadecimal digits of an identity that a made-up file name carries."""


def short_name(identity: str, extension: str) -> str:
    """A file name for an image whose client tells none."""
    return f"image_{identity[:SHORT]}{extension}"


def numbered(identities: Iterable[str], texts: Sequence[str]) -> dict[str, int]:
    """The number of every image of a conversation.

    Args:
        identities: of the images, in the order in which they stand in the conversation.
        texts: of the conversation's answers; tables in them say which numbers are given already.
    """
    given = numbers_told(texts)
    numbers: dict[str, int] = {}
    last = max(given.values(), default=0)
    for identity in identities:
        if identity in numbers:
            continue
        number = given.get(identity[:SHORT])
        if number is None:
            last += 1
            number = last
        numbers[identity] = number
    return numbers


def numbers_told(texts: Iterable[str]) -> dict[str, int]:
    """By the first digits of their identities: what tables in `texts` say."""
    given: dict[str, int] = {}
    for text in texts:
        for table in _TABLE.finditer(text):
            for row in _ROW.finditer(table[1]):
                given.setdefault(row[2], int(row[1]))
    return given


def table(numbers: Mapping[int, str]) -> str:
    """The table of `numbers` (number: file name), to stand at the end of an answer."""
    return HEAD + "\n".join(f"| {number} | {name} |" for number, name in sorted(numbers.items()))


def without_table(text: str, known: Iterable[str]) -> str:
    """`text` without a table at its end whose images are all among `known` (first digits of identities)."""
    tables = list(_TABLE.finditer(text))
    if not tables or text[tables[-1].end() :].strip():
        return text
    found = tables[-1]
    told = {row[2] for row in _ROW.finditer(found[1])}
    return text[: found.start()].rstrip() if told <= set(known) else text
