"""Finding markers in a stream of text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from start_llm.parsing.source import Source, Step

KEPT, KEPT_CHARACTERS = 32, 2_000
"""Automata that are kept, and how long all literals of such a one may be: clients choose some of them."""


class _Automaton:
    """Aho and Corasick's, of a set of literals. Never changed once it is made.

    Attributes:
        next: of each state, what follows it by the next character.
        length: of the text that leads to a state: what is held back there.
        hit: length of the longest literal that is complete in a state.
        fall: of each state, the one of its longest proper suffix that some literal begins with.
        first: finds what a literal may begin with.
    """

    def __init__(self, literals: frozenset[str]) -> None:
        """Time and memory are proportional to the length of all literals."""
        self.next: list[dict[str, int]] = [{}]
        self.length = [0]
        self.hit = [0]
        for literal in sorted(literals):
            self._add(literal)
        self.fall = self._falls()
        firsts = "".join(map(re.escape, self.next[0]))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def _add(self, literal: str) -> None:
        state = 0
        for char in literal:
            known = self.next[state].get(char)
            if known is None:
                known = len(self.next)
                self.next[state][char] = known
                self.next.append({})
                self.length.append(self.length[state] + 1)
                self.hit.append(0)
            state = known
        self.hit[state] = len(literal)

    def _falls(self) -> list[int]:
        """For every state the one of its longest proper suffix that some literal begins with."""
        fall = [0] * len(self.next)
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            self.hit[state] = self.hit[state] or self.hit[fall[state]]
            for char, after in self.next[state].items():
                back = fall[state]
                while back and char not in self.next[back]:
                    back = fall[back]
                fall[after] = self.next[back].get(char, 0)
                waiting.append(after)
        return fall


_kept = lru_cache(KEPT)(_Automaton)


class LiteralScanner:
    """Cuts text at a set of literals. The literal that is complete first wins, then the longest.

    Each character is looked at once; what may still become a literal is held back. How many literals there are, and how
    much alike, does not matter: they are one automaton. For one source.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        """Most answers are cut at the same literals: their automaton takes as long as 100 tokens, and is kept."""
        self._held = (-1, 0, 0)  # where held text begins, as an absolute offset; its length; the state behind it
        found = frozenset(literals) - {""}
        self._automaton = (_kept if sum(map(len, found)) <= KEPT_CHARACTERS else _Automaton)(found)

    def step(self, source: Source) -> Step[tuple[str, str]]:
        """Consume text up to a literal, and it: (text before, literal).

        The literal is ``""`` if the text is only as much as is certain now; both are ``""`` at the end.
        """
        while True:
            begins, seen, state = self._held
            if begins != source.offset:
                seen, state = 0, 0
            end, state = self._run(source.text, source.pos + seen, state)
            size = self._automaton.hit[state]
            if size:
                before = source.take(end - size - source.pos)
                return before, source.take(size)
            held = 0 if source.closed else self._automaton.length[state]
            before = source.take(source.left - held)
            self._held = (source.offset, held, state)
            if before or source.closed:
                return before, ""
            yield

    def _run(self, text: str, pos: int, state: int) -> tuple[int, int]:
        """(where the first literal ends, or the text), and the state there."""
        known = self._automaton
        following, fall, hit, first = known.next, known.fall, known.hit, known.first
        end = len(text)
        while pos < end:
            if not state:
                match = first.search(text, pos)
                if match is None:
                    return end, 0
                pos = match.start()
            char = text[pos]
            while state and char not in following[state]:
                state = fall[state]
            state = following[state].get(char, 0)
            pos += 1
            if hit[state]:
                break
        return pos, state
