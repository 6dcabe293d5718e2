"""Tables of text on the terminal, as the commands print them. Standard library only: rich costs a tenth of a second."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from unicodedata import category, combining, east_asian_width


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]) -> None:
    """Prints one line for each row; a long one goes on at the terminal's edge, where names are not cut.

    Args:
        words: the headings above words; figures stand at the right of their column.
    """
    table = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_columns, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = []
        for heading, cell, width in zip(headings, line, widths, strict=True):
            space = " " * (width - _columns(cell))
            cells.append(cell + space if heading in words else space + cell)
        print("  ".join(cells).rstrip())


def _columns(text: str) -> int:
    """How wide a terminal shows it."""
    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def words_only(text: str) -> str:
    """A text of several lines without control characters: a terminal obeys them, and models and clients write them.
    Signs that join letters and emojis stay."""
    return "".join(sign for sign in text if sign in "\n\t" or category(sign) != "Cc")


def printable(text: str) -> str:
    """Without what a terminal would obey: names come from clients and files."""
    return "".join(character if character.isprintable() else "?" for character in text)
