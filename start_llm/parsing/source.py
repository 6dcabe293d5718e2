"""The text being parsed (`Source`), the literals in it (`LiteralScanner`), and tokens that end or begin a turn.

A parser is a generator that yields whenever it needs more text than there is. All reading goes through `Source`, whose
answers depend on the text alone and never on how it was cut into chunks; so whatever is built on it parses a stream
exactly as it parses the whole. Knows no tool format and no reasoning.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

type Step[T] = Generator[None, None, T]

WHITESPACE = " \t\r\n"


class Source:
    """Text that grows at the end and is consumed from the front. One thread.

    While a `mark` is held, everything is kept, so that `rewind` can come back to it. Once it is `closed`, no more text
    comes: every waiting parser gets its end.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._marks = 0
        self._dropped = 0

    def push(self, text: str) -> None:
        if not self._marks:
            self.text = self.text[self.pos :]
            self._dropped += self.pos
            self.pos = 0
        self.text += text

    def mark(self) -> int:
        self._marks += 1
        return self.pos

    def unmark(self) -> None:
        self._marks -= 1

    def rewind(self, mark: int) -> None:
        """Go back to a mark that is still held, and release it."""
        self._marks -= 1
        self.pos = mark

    @contextmanager
    def lookahead(self) -> Iterator[None]:
        """What is read inside is not consumed."""
        mark = self.mark()
        try:
            yield
        finally:
            self.rewind(mark)

    @property
    def offset(self) -> int:
        """How many characters have been consumed, those given back not counted."""
        return self._dropped + self.pos

    @property
    def left(self) -> int:
        """Characters that are here and not consumed."""
        return len(self.text) - self.pos

    def take(self, count: int) -> str:
        """Consume characters that are known to be here."""
        piece = self.text[self.pos : self.pos + count]
        self.pos += len(piece)
        return piece

    def peek(self, count: int) -> str:
        """Characters that are known to be here, not consumed."""
        return self.text[self.pos : self.pos + count]

    def ahead(self, offset: int = 0) -> Step[str]:
        """The character `offset` from here, ``""`` if the text ends before it."""
        while self.left <= offset and not self.closed:
            yield
        at = self.pos + offset
        return self.text[at] if at < len(self.text) else ""

    def blank(self, offset: int = 0, chars: str = WHITESPACE) -> Step[int]:
        """The offset of the first character at or after `offset` that is not in `chars`."""
        while True:
            char = yield from self.ahead(offset)
            if not char or char not in chars:
                return offset
            offset += 1

    def skip(self, chars: str = WHITESPACE) -> Step[str]:
        """Consume and return a run of `chars`."""
        count = yield from self.blank(0, chars)
        return self.take(count)

    def starts(self, literals: Sequence[str], offset: int = 0) -> Step[str]:
        """The longest of `literals` that stands at `offset`, or ``""``. Consumes nothing."""
        longest = max(map(len, literals), default=0)
        while True:
            at = self.pos + offset
            here = self.text[at : at + longest]
            undecided = [s for s in literals if len(s) > len(here) and s.startswith(here)]
            if not undecided or self.closed:
                return max((s for s in literals if here.startswith(s)), key=len, default="")
            yield

    def accept(self, literals: Sequence[str]) -> Step[str]:
        """Like `starts`, and consumes what was found."""
        found = yield from self.starts(literals)
        self.pos += len(found)
        return found

    def run(self, pattern: re.Pattern[str], limit: int, offset: int = 0) -> Step[int]:
        """How many single characters match `pattern` from `offset` on, at most `limit`."""
        count = 0
        while count < limit and pattern.match((yield from self.ahead(offset + count)) or "\n"):
            count += 1
        return count

    def after_space(self, *literals: str) -> Step[str]:
        """White space is consumed, and the longest of `literals` if it stands behind it."""
        yield from self.skip()
        return (yield from self.accept(literals))

    def span(self, pattern: re.Pattern[str], limit: int) -> Step[str]:
        """Consume and return such a run."""
        return self.take((yield from self.run(pattern, limit)))

    def until(self, literals: Sequence[str], limit: int) -> Step[tuple[str, str]]:
        """Consume up to and including the first of `literals`; gives (text before, literal).

        Nothing is consumed, and both are ``""``, if none comes within `limit` characters or before the end.
        """
        count = 0
        while count <= limit:
            char = yield from self.ahead(count)
            if not char:
                break
            found = yield from self.starts(literals, count)
            if found:
                before = self.take(count)
                self.pos += len(found)
                return before, found
            count += 1
        return "", ""


# --- literals ---

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
        self.fall = [0] * len(self.next)
        self._set_falls()
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

    def _set_falls(self) -> None:
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            self.hit[state] = self.hit[state] or self.hit[self.fall[state]]
            for char, after in self.next[state].items():
                back = self.fall[state]
                while back and char not in self.next[back]:
                    back = self.fall[back]
                self.fall[after] = self.next[back].get(char, 0)
                waiting.append(after)


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
        """Consume (text, the literal behind it); without a literal it is as much as is certain, ``""`` at the end."""
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


# --- turn tokens: they end or begin a turn. In an answer they are leaks: left out, or the answer is over ---

ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
STARTS: Mapping[str, str] = {"<|im_start|>": "\n", "<start_of_turn>": "\n", "<|start_header_id|>": "<|end_header_id|>"}
"""By token: what ends the role that stands behind it."""
LEAKED = (*ENDS, *STARTS, "<|im_start|>assistant\n")
_OWN_ROLES = ("assistant", "model", "ai")
_OTHER_ROLES = ("user", "system", "developer", "tool", "ipython", "function", "observation", "human")
_MAX_ROLE = 16


def turn_ends(source: Source, offset: int, more: tuple[str, ...] = (), *, roles: bool = True) -> Step[bool]:
    """Whether the turn ends at `offset`, or a piece of markup out of `more` stands there.

    A turn token alone proves nothing, since a value may talk about such tokens: the text must end behind it, or `more`
    follow, or (with `roles`) the role of a new turn.
    """
    leaked = ""
    while True:
        offset = yield from source.blank(offset)
        if not (yield from source.ahead(offset)) or (yield from source.starts(more, offset)):
            return True
        if roles and leaked in STARTS and (yield from source.starts((*_OWN_ROLES, *_OTHER_ROLES), offset)):
            return True
        leaked = yield from source.starts((*ENDS, *STARTS), offset)
        if not leaked:
            return False
        offset += len(leaked)


def other_turn(source: Source, token: str) -> Step[bool]:
    """Consumes the role behind a turn's first `token`; whether it is somebody else's."""
    role = yield from source.starts((*_OWN_ROLES, *_OTHER_ROLES))
    if not role:
        return False
    closer = STARTS[token]
    if not (yield from source.starts((closer,), len(role))):
        return False
    source.take(len(role) + len(closer))
    if closer != "\n":
        yield from source.skip("\n")
    return role in _OTHER_ROLES
