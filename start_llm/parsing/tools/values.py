"""Parameter values between tags, written as JSON while they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from start_llm.parsing.calls import CallBuilder
from start_llm.parsing.schema import Schema, dump, escape, parse_literal
from start_llm.parsing.source import LEAKED, Source, Step, turn_ends


@dataclass(frozen=True)
class ValueEnd:
    """Where a value ends.

    A value may hold its closing tag as content (code that is about such tags). So the tag counts only if one of
    `followers`, or the end of the turn, comes after it. Where no such tag comes at all, the first one that was seen is
    taken after all.

    Attributes:
        breaks: markup that ends a value whose closing tag is missing, if it begins a line (or anywhere, if
            `anywhere`) and `plausible` says so.
        restart: the same for markup that begins another call, behind a closing tag that was not sure.
    """

    tags: tuple[str, ...]
    followers: tuple[str, ...]
    breaks: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    anywhere: bool = False


@dataclass
class ValueReader:
    """Reads one value from `source` into `writer`, up to where `close` says. For `plausible` see `ValueEnd`."""

    source: Source
    close: ValueEnd
    writer: ValueWriter
    plausible: Callable[[str], Step[bool]]
    _last: str = "\n"
    _held: list[str] = field(default_factory=list)
    _mark: int | None = None
    _mark_tag: str = ""

    def read_value(self) -> Step[bool]:
        """False if the turn ended before the value did."""
        source, close, complete = self.source, self.close, True
        tags = (*close.tags, *close.breaks, *close.restart, *LEAKED)
        leads = "".join({tag[0] for tag in tags})
        plain = re.compile(f"[^{re.escape(leads)}]+")
        while True:
            run = plain.match(source.text, source.pos)
            if run:
                self._content(source.take(run.end() - source.pos))
            char = yield from source.ahead()
            if not char:
                complete = self._fall_back()
                break
            if char not in leads:
                continue
            tag = yield from source.starts(tags)
            if tag in close.tags:
                if (yield from turn_ends(source, len(tag), close.followers)):
                    self._release()
                    source.pos += len(tag)
                    break
                if self._mark is None:
                    self._mark, self._mark_tag = source.mark(), tag
            elif tag in LEAKED and (yield from turn_ends(source, 0, roles=False)):
                complete = self._fall_back()
                break
            elif tag and (yield from self._breaks(tag)):
                if self._mark is not None:
                    self._fall_back()
                break
            self._content(source.take(1))
        self.writer.end_value()
        return complete

    def _breaks(self, tag: str) -> Step[bool]:
        if self._last != "\n" and not self.close.anywhere:
            return False
        if tag not in self.close.breaks and (tag not in self.close.restart or self._mark is None):
            return False
        return (yield from self.plausible(tag))

    def _content(self, text: str) -> None:
        self._last = text[-1]
        if self._mark is None:
            self.writer.add(text)
        else:
            self._held.append(text)

    def _release(self) -> None:
        if self._mark is not None:
            self.source.unmark()
            self.writer.add("".join(self._held))

    def _fall_back(self) -> bool:
        """No closing tag was sure: take the first that was seen, or the end of the turn. False if none was seen."""
        if self._mark is None:
            return False
        self.source.rewind(self._mark)
        self.source.take(len(self._mark_tag))
        return True


class ValueWriter:
    """Text of one parameter, written into the call's JSON as the schema says.

    A value that must be a string is written as it comes. Anything else is held until its end, then read as a literal
    and coerced. With `trim_start` a line break at the start is markup, and then one at the end is, too.
    """

    def __init__(self, call: CallBuilder, schema: Schema, *, as_string: bool = False) -> None:
        self.trim_start = True
        self.trim_end = False
        self._call = call
        self._schema = schema
        types = schema.types
        self._string = as_string or types == {"string"}
        self._nullable = not as_string and types == {"string", "null"}
        self._started = False
        self._has_begun = False
        self._gap = ""
        self._text: list[str] = []

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._has_begun:
            self._has_begun = True
            if self.trim_start and text[0] == "\n":
                text, self.trim_end = text[1:], True
        text = self._gap + text
        self._gap = ""
        if self.trim_end and text.endswith("\n"):
            text, self._gap = text[:-1], "\n"
        self._put(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._nullable:  # only until it is clear that this is not the word "null"
            self._text.append(text)
            if "null".startswith("".join(self._text).strip().lower()):
                return
            text, self._nullable, self._string = "".join(self._text), False, True
            self._text.clear()
        if not self._string:
            self._text.append(text)
            return
        self._call.write(escape(text) if self._started else '"' + escape(text))
        self._started = True

    def end_value(self) -> None:
        if self._string:
            self._call.write('"' if self._started else '""')
            return
        self._call.write(dump(self._schema.coerce(self._value("".join(self._text)))))

    def _value(self, text: str) -> object:
        """What a text without quotes stands for: a literal where the schema allows it, else the text."""
        schema, stripped = self._schema, text.strip()
        word = stripped.lower()
        if not stripped and schema.allows("string"):
            return text
        if word in ("null", "none") and (self._nullable or not schema.types):
            return None
        if self._nullable:
            return text
        found, literal = parse_literal(stripped)
        if not found and word in ("true", "false"):
            found, literal = True, word == "true"
        if found and schema.types and not schema.valid(literal) and schema.allows("string"):
            return text
        return literal if found else text
