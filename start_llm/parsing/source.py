"""The text being parsed (`Source`), the literals in it (`LiteralScanner`), and tokens that end or begin a turn.

A parser is a generator that yields whenever it needs more text than there is. All reading goes through `Source`, whose
answers depend on the text alone and never on how it was cut into chunks; so whatever is built on it parses a stream
exactly as it parses the whole. Knows no tool format and no reasoning.
"""

from __future__ import annotations

import re
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
"""Sets of literals that are kept, and how long all literals of such a one may be: clients choose some of them."""


class _Literals:
    """A set of literals, and every beginning of one. Never changed once it is made."""

    def __init__(self, literals: frozenset[str]) -> None:
        self.whole = literals
        self.begun = frozenset(literal[:end] for literal in literals for end in range(1, len(literal) + 1))
        self.lengths = sorted({len(literal) for literal in literals}, reverse=True)
        firsts = "".join(sorted({re.escape(literal[0]) for literal in literals}))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")


_kept = lru_cache(KEPT)(_Literals)


class LiteralScanner:
    """Cuts text at a set of literals. The literal that is complete first wins, then the longest.

    Each character is looked at once; what may still become a literal is held back. How many literals there are, and how
    much alike, does not matter. For one source.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        """Most answers are cut at the same literals: what is made of them takes as long as 100 tokens, and is kept."""
        self._held = (-1, "")  # where held text begins, as an absolute offset, and that text
        found = frozenset(literals) - {""}
        self._literals = (_kept if sum(map(len, found)) <= KEPT_CHARACTERS else _Literals)(found)

    def step(self, source: Source) -> Step[tuple[str, str]]:
        """Consume (text, the literal behind it); without a literal it is as much as is certain, ``""`` at the end."""
        while True:
            begins, held = self._held
            held = held if begins == source.offset else ""
            end, held, literal = self._run(source.text, source.pos + len(held), held)
            if literal:
                before = source.take(end - len(literal) - source.pos)
                return before, source.take(len(literal))
            held = "" if source.closed else held
            before = source.take(source.left - len(held))
            self._held = (source.offset, held)
            if before or source.closed:
                return before, ""
            yield

    def _run(self, text: str, pos: int, held: str) -> tuple[int, str, str]:
        """(where the first literal ends, or the text; the beginning of a literal that stands there; that literal)."""
        known = self._literals
        end = len(text)
        while pos < end:
            if not held:
                match = known.first.search(text, pos)
                if match is None:
                    return end, "", ""
                pos = match.start()
            held += text[pos]
            while held and held not in known.begun:
                held = held[1:]
            pos += 1
            for length in known.lengths if held else ():
                if held[-length:] in known.whole:
                    return pos, held, held[-length:]
        return pos, held, ""


# --- turn tokens: they end or begin a turn. In an answer they are leaks: left out, or the answer is over ---

ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
STARTS: Mapping[str, str] = {"<|im_start|>": "\n", "<start_of_turn>": "\n", "<|start_header_id|>": "<|end_header_id|>"}
"""By token: what ends the role that stands behind it."""
LEAKED = (*ENDS, *STARTS, "<|im_start|>assistant\n")
_OWN_ROLES = ("assistant", "model", "ai")
_OTHER_ROLES = ("user", "system", "developer", "tool", "ipython", "function", "observation", "human")


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
