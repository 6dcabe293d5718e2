"""What agent clients change in text that was answered already: the declared places, grouped by client.

The built-in ones stand in `clients/`, with what else is known of an agent.

A client is known by its system text. Its rules hold in its conversations only, and each is anchored to whole lines,
tags or messages that the client writes. For every client, known or not, the lines of the system text may change.
`docs/prompt.md` says what the kinds of rules mean.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from start_llm.clients import CLIENTS
from start_llm.clients.agent import CLEARED
from start_llm.core.messages import Message
from start_llm.core.paths import expanded

Kind = Literal["drop", "stamp", "state", "transient", "cleared"]
# One of a message's first three lines, a block at its start or end, any whole line, from a line to the end (if the
# system text has the same words), the whole message.
Place = Literal["head", "start", "end", "line", "rest", "whole"]
_HEAD_LINES = 3
_SPACE = re.compile(r"\s*")
_SIGN_CHARS = 2000  # a client's system text shows whose it is near its beginning


class RuleError(ValueError):
    """A bad client or rule in CACHE_RULES_FILE. The message names the file, the place and what is wrong."""


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if compiled.fullmatch("") is not None:
        raise ValueError(f"{text!r} matches the empty text")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
Word = Annotated[str, Field(pattern=r"^[\w-]+$")]


class Rule(BaseModel):
    """One declared place."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Word
    kind: Kind
    role: Literal["system", "user", "tool"] = "user"
    place: Place
    opens: Pattern  # regular expression for its beginning, at that of a line; without `closes` it is one line
    closes: Pattern | None = None  # regular expression for its end, at the end of a line
    reply: Pattern | None = None  # for ``whole``: the assistant message that the client makes up behind it
    moves: bool = False  # the client moves it from request to request: it belongs to no message


class Habit(BaseModel):
    """An argument that a client adds to calls of a tool, though the model did not write it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tool: str
    key: str
    value: bool | int | float | str


class ClientRules(BaseModel):
    """A client's rules and habits, and the regular expression by which the beginning of its system text shows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Word
    system: Pattern
    rules: tuple[Rule, ...] = ()
    habits: tuple[Habit, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    client: tuple[ClientRules, ...]


# Any client may have this server clear results (`context_management`), in the words that agents use for it themselves.
UNKNOWN = ClientRules.model_construct(name="unknown", system="", rules=(Rule.model_validate(CLEARED),), habits=())

BUILT_IN = tuple(ClientRules.model_validate(client.requests) for client in CLIENTS.values() if client.requests)


@dataclass(frozen=True, slots=True)
class DeclaredPlace:
    """A declared place found in a message's text: characters `start` to `end`; `text` is what it says."""

    rule: Rule
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Clients:
    """All clients that are known, a user's own first."""

    clients: tuple[ClientRules, ...] = BUILT_IN

    @staticmethod
    def load(path: Path | None) -> Clients:
        """The built-in clients, and those of a TOML file (``[[client]]`` with ``[[client.rules]]``) before them.

        A client of the file replaces the built-in one of its name. Raises RuleError.
        """
        if path is None:
            return Clients()
        try:
            data = tomllib.loads(expanded(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RuleError(f"{path}: cannot be read: {error}") from None
        try:
            own = _File.model_validate(data).client
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RuleError(f"{path}: {place}={first['input']!r}: {first['msg']}") from None
        names = [client.name for client in own]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RuleError(f"{path}: client {twice[0]!r}: the name is used twice")
        return Clients(own + tuple(client for client in BUILT_IN if client.name not in names))

    def of(self, messages: Sequence[Message]) -> ClientRules:
        """The client whose conversation this is, by the system message at its front."""
        if not messages or messages[0].role != "system":
            return UNKNOWN
        head = messages[0].content[:_SIGN_CHARS]
        return next((client for client in self.clients if re.search(client.system, head, re.MULTILINE)), UNKNOWN)


def find_parts(message: Message, client: ClientRules, system: str) -> tuple[DeclaredPlace, ...]:
    """The declared places in a message of `client`'s, in order, never overlapping. `system`: the system text."""
    text = message.content
    rules = [rule for rule in client.rules if rule.role == message.role]
    if not rules or not text:
        return ()
    for rule in rules:
        if rule.place == "whole" and _is_whole(rule, text):
            return (DeclaredPlace(rule, 0, len(text), text.strip()),)
    parts = _edges(rules, text)
    for rule in rules:
        taken = sorted((part.start, part.end) for part in parts)
        for start, end in _inside(rule, text, system):
            if _is_free(taken, start, end):
                parts.append(DeclaredPlace(rule, start, end, text[start:end].strip()))
    return tuple(sorted(parts, key=lambda part: part.start))


def _is_free(taken: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether `start` to `end` meets none of `taken`, which are in order and do not meet each other."""
    before = bisect_left(taken, (end,))
    return before == 0 or taken[before - 1][1] <= start


def space_end(text: str, start: int) -> int:
    """Where the white space that begins at `start` ends."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing, too


def _is_whole(rule: Rule, text: str) -> bool:
    opened = re.match(rule.opens, text, re.MULTILINE)
    if opened is None or rule.closes is None:
        return opened is not None
    return re.search(rule.closes, text[opened.end() :], re.MULTILINE) is not None


def _edges(rules: Sequence[Rule], text: str) -> list[DeclaredPlace]:
    """Blocks one behind the other at the start of the text, and at its end.

    Each step looks at its block only, not at all of the text: there may be tens of thousands of them.
    """
    parts: list[DeclaredPlace] = []
    start = 0
    at_start = [rule for rule in rules if rule.place == "start"]
    while found := next(((rule, stop) for rule in at_start if (stop := _block(rule, text, start)) is not None), None):
        parts.append(DeclaredPlace(found[0], start, found[1], text[start : found[1]].strip()))
        start = space_end(text, found[1])
    end = _trimmed(text, len(text))
    patterns = [(rule, re.compile(f"^(?:{rule.opens})", re.MULTILINE)) for rule in rules if rule.place == "end"]
    opens = [(rule, [opened.start() for opened in begins.finditer(text, start, end)]) for rule, begins in patterns]
    while last := _last(opens, text, end):
        parts.append(DeclaredPlace(last[0], last[1], end, text[last[1] : end].strip()))
        end = _trimmed(text, last[1])
    return parts


def _trimmed(text: str, end: int) -> int:
    """Where the text before `end` ends without its white space."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def _block(rule: Rule, text: str, start: int, end: int | None = None) -> int | None:
    """Where the block that begins at `start` ends, in the text up to `end`; None if there is none."""
    stop = len(text) if end is None else end
    opened = re.compile(rule.opens, re.MULTILINE).match(text, start, stop)
    if opened is None:
        return None
    if rule.closes is not None:
        closed = re.compile(rule.closes, re.MULTILINE).search(text, opened.end(), stop)
        return closed.end() if closed is not None else None
    return opened.end() if opened.end() == stop or text[opened.end()] == "\n" else None


def _last(opens: Sequence[tuple[Rule, list[int]]], text: str, end: int) -> tuple[Rule, int] | None:
    """The rule and the beginning of the block that ends at `end`; None if there is none.

    It begins at the last place where one may: a block ends with the first end behind its beginning. `opens`: by rule,
    where blocks may begin; what lies behind `end` is taken off.
    """
    for rule, places in opens:
        while places and places[-1] >= end:
            places.pop()
        if places and _block(rule, text, places[-1], end) == end:
            return rule, places[-1]
    return None


def _inside(rule: Rule, text: str, system: str) -> list[tuple[int, int]]:
    """Characters of the parts that a rule of the places ``head``, ``line`` and ``rest`` finds."""
    if rule.place == "head":
        lines = text.split("\n")[:_HEAD_LINES]
        ends = [min(end, len(text)) for end in accumulate(len(line) + 1 for line in lines)]
        places = zip([0, *ends], ends, lines, strict=False)
        return [(start, end) for start, end, line in places if re.fullmatch(rule.opens, line.strip())]
    if rule.place == "line":
        return [found.span() for found in re.finditer(f"^(?:{rule.opens})$", text, re.MULTILINE)]
    if rule.place == "rest":
        found = re.search(f"^(?:{rule.opens})", text, re.MULTILINE)
        return [(found.start(), len(text))] if found and text[found.start() :].strip() in system else []
    return []
