"""Finding markers in a stream of text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from start_llm.parsing.source import Source, Step


class Scanner:
    """Cuts text at a set of literals. The literal that is complete first wins, then the longest.

    Work is proportional to the new text; what may still become a literal is held back.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        found = sorted(set(literals) - {""})  # so that of two at one place the shorter is tried first
        self._pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
        self._prefixes = {literal[:count] for literal in found for count in range(1, len(literal))}
        self._longest = max(map(len, self._prefixes), default=0)

    def step(self, source: Source) -> Step[tuple[str, str]]:
        """Consume text up to a literal, and it: (text before, literal).

        The literal is ``""`` if the text is only as much as is certain now; both are ``""`` at the end.
        """
        while True:
            hit = self._first(source.text, source.pos)
            if hit:
                start, literal = hit
                before = source.take(start - source.pos)
                source.pos += len(literal)
                return before, literal
            sure = source.left - (0 if source.closed else self._held(source))
            if sure or source.closed:
                return source.take(sure), ""
            yield

    def _first(self, text: str, pos: int) -> tuple[int, str] | None:
        match = self._pattern.search(text, pos)
        best = None
        while match is not None:  # the leftmost; then any that lies inside and ends before it
            best = match
            match = self._pattern.search(text, best.start() + 1, best.end() - 1)
        return (best.start(), best.group()) if best else None

    def _held(self, source: Source) -> int:
        for count in range(min(self._longest, source.left), 0, -1):
            if source.text[-count:] in self._prefixes:
                return count
        return 0
