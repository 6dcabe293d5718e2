"""Tables of text on the terminal, as the commands print them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str], width: int = 120
) -> None:
    """Prints one line for each row, more where a cell is too long.

    Args:
        words: the headings above words; figures stand at the right of their column.
        width: the least that is assumed of the terminal.
    """
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False, width=max(width, shutil.get_terminal_size().columns)).print(table)


def printable(text: str) -> str:
    """Without what a terminal would obey: names come from clients and files."""
    return "".join(character if character.isprintable() else "?" for character in text)
