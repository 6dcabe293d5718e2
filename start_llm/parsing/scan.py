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
        self._literals = sorted(set(literals) - {""})
        self._pattern = re.compile("|".join(map(re.escape, self._literals)) or r"(?!)")
        self._prefixes = {literal[:count] for literal in self._literals for count in range(1, len(literal))}
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
        if match is None:
            return None
        best = (match.end(), match.start(), match.group())
        for literal in self._literals:
            start = text.find(literal, pos, best[0])
            if start >= 0:
                best = min(best, (start + len(literal), start, literal))
        return best[1], best[2]

    def _held(self, source: Source) -> int:
        for count in range(min(self._longest, source.left), 0, -1):
            if source.text[-count:] in self._prefixes:
                return count
        return 0
