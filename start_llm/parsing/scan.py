"""Finding markers in a stream of text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from start_llm.parsing.source import Source, Step


class Scanner:
    """Cuts text at a set of literals. The literal that is complete first wins, then the longest.

    Each character is looked at once; what may still become a literal is held back. How many literals there are, and how
    much alike, does not matter: they are one automaton (Aho and Corasick's). For one source.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        """Time and memory are proportional to the length of all literals."""
        self._held = (-1, 0, 0)  # where held text begins, as an absolute offset; its length; the state behind it
        found = sorted(set(literals) - {""})
        self._next: list[dict[str, int]] = [{}]
        self._length = [0]  # of the text that leads to a state: what is held back there
        self._hit = [0]  # length of the longest literal that is complete in a state
        for literal in found:
            self._add(literal)
        self._fall = self._falls()
        firsts = "".join(map(re.escape, self._next[0]))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def _add(self, literal: str) -> None:
        state = 0
        for char in literal:
            known = self._next[state].get(char)
            if known is None:
                known = len(self._next)
                self._next[state][char] = known
                self._next.append({})
                self._length.append(self._length[state] + 1)
                self._hit.append(0)
            state = known
        self._hit[state] = len(literal)

    def _falls(self) -> list[int]:
        """For every state the one of its longest proper suffix that some literal begins with."""
        fall = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self._hit[state] = self._hit[state] or self._hit[fall[state]]
            for char, after in self._next[state].items():
                back = fall[state]
                while back and char not in self._next[back]:
                    back = fall[back]
                fall[after] = self._next[back].get(char, 0)
                waiting.append(after)
        return fall

    def step(self, source: Source) -> Step[tuple[str, str]]:
        """Consume text up to a literal, and it: (text before, literal).

        The literal is ``""`` if the text is only as much as is certain now; both are ``""`` at the end.
        """
        while True:
            begins, seen, state = self._held
            if begins != source.offset:
                seen, state = 0, 0
            end, state = self._run(source.text, source.pos + seen, state)
            size = self._hit[state]
            if size:
                before = source.take(end - size - source.pos)
                return before, source.take(size)
            held = 0 if source.closed else self._length[state]
            before = source.take(source.left - held)
            self._held = (source.offset, held, state)
            if before or source.closed:
                return before, ""
            yield

    def _run(self, text: str, pos: int, state: int) -> tuple[int, int]:
        """(where the first literal ends, or the text), and the state there."""
        following, fall, hit = self._next, self._fall, self._hit
        end = len(text)
        while pos < end:
            if not state:
                match = self._first.search(text, pos)
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
