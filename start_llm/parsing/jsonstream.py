"""JSON as models write it, turned into valid JSON as it comes.

Valid JSON passes through unchanged, character by character (but for white space before a comma or a colon). Mended on
the way: trailing and missing commas, Python literals, single and triple quotes, bare keys and words, raw line breaks
and bad escapes in strings, quotes left unescaped inside a string, and text that ends early. Values whose type the
schema forbids are held back and coerced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from start_llm.core.jsontext import no_constant
from start_llm.parsing.schema import ANYTHING, Schema, dump, escape, parse_literal
from start_llm.parsing.source import WHITESPACE, Source, Step

# What passes as it is, by the string's quote: escapes that JSON knows too, but not where backslashes are content.
_IN_DOUBLE = re.compile(r'(?:[^\x00-\x1f"\\<]|\\["\\/bfnrt])+')
_IN_OTHER = re.compile(r'(?:[^\x00-\x1f"\'\\<]|\\["\\/bfnrt])+')
_IN_RAW = re.compile(r'[^\x00-\x1f"\\<]+')
_HEX = re.compile(r"[0-9a-fA-F]")
_WORD = re.compile(r"[\w.\-]")
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # in any case of letters
_NOTHING = ("NaN", "nan", "Infinity", "-Infinity", "undefined", "")  # only as they stand: others may be names
_BARE_KEY = re.compile(r"[^:=,})\n]")  # what no separator is, and no end
_MAX_KEY = 400
MOST_DEPTH = 64
"""Lists and objects inside each other. What is nested more deeply is written as a string: clients send it back inside
of bodies of their own, and readers have limits (`core.limits.DEPTH` here)."""


@dataclass(frozen=True)
class Dialect:
    """How a format writes objects."""

    separator: str = ":"  # what stands between key and value
    quotes: tuple[str, ...] = ('"""', '"', "'")  # string delimiters; longer ones are tried first
    # markup that ends the whole call; inside a string it is content unless the string never closes
    enders: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()  # markup that, after an ender, proves that a new call begins


class JsonStream:
    """Reads one value from `source` and writes it as valid JSON. `ended`: the text ended early."""

    def __init__(self, source: Source, write: Callable[[str], None], dialect: Dialect) -> None:
        self.ended = False
        self._source = source
        self._out = write
        self._lead: str | None = None  # goes out with what is written next, or not at all
        self._dialect = dialect
        self._depth = 0

    def value(self, schema: Schema, closer: str = "") -> Step[bool]:
        """One value, of any kind. False, and nothing written, if the text ends or closes before it."""
        yield from self._source.skip()
        if (yield from self.at_end()):
            return False
        char = yield from self._source.ahead()
        if char in ")]},":
            return False
        quoted = yield from self._source.starts(self._dialect.quotes)
        kind = "object" if char == "{" else "array" if char in "[(" else "string" if quoted else ""
        if not kind:
            yield from self._token(schema)
        elif schema.allows(kind):
            yield from self._dispatch(kind, schema, closer)
        else:
            text = yield from self._captured(self._dispatch(kind, ANYTHING, closer))
            keep_text = kind != "string" and schema.types <= {"string", "null"}
            self._write(dump(text if keep_text else schema.coerce(json.loads(text, strict=False))))
        return True

    def _write(self, text: str) -> None:
        self._out(text if self._lead is None else self._lead + text)
        self._lead = None

    def _dispatch(self, kind: str, schema: Schema, closer: str) -> Step[None]:
        if kind == "string":
            yield from self.string(closer)
        elif self._depth == MOST_DEPTH:
            yield from self._deep()
        else:
            self._depth += 1
            yield from self._container(schema, {"{": "}", "[": "]", "(": ")"}[self._source.take(1)])
            self._depth -= 1

    def _deep(self) -> Step[None]:
        """A list or an object, as a string of its text: up to its closing bracket, or the end."""
        count, open_brackets, quoted = 0, 0, False
        while True:
            char = yield from self._source.ahead(count)
            ender = not quoted and (yield from self._source.starts(self._dialect.enders, count))
            if not char or ender:
                self.ended = True
                break
            if char == "\\":
                count += 1
            elif char == '"':
                quoted = not quoted
            elif not quoted:
                open_brackets += (char in "[{(") - (char in "]})")
            count += 1
            if not open_brackets:
                break
        self._write(dump(self._source.take(count)))

    def _captured(self, steps: Step[None]) -> Step[str]:
        """What `steps` write, which does not go out."""
        held: list[str] = []
        before = self._out, self._lead
        self._out, self._lead = held.append, None
        yield from steps
        self._out, self._lead = before
        return "".join(held)

    def _container(self, schema: Schema, closer: str) -> Step[None]:
        """What stands behind an opening bracket that was consumed, up to its `closer`."""
        opened, closed = "{}" if closer == "}" else "[]"
        items = schema.items if opened == "[" else None
        self._write(opened)
        space = yield from self._source.skip()
        comma = ""
        while not (yield from self.at_end()):
            char = yield from self._source.ahead()
            if char == closer:
                self._source.take(1)
                self._write(space + closed)
                return
            if char == ",":
                yield from self._source.skip(WHITESPACE + ",")
                continue
            if char in ")]}":  # a bracket that closes something further out
                break
            self._lead = comma + space
            if items is not None:
                yield from self.value(items, closer)
            elif not (yield from self._member(schema)):
                break
            comma, self._lead = comma if self._lead is not None else ",", None
            space = yield from self._source.skip()
            if (yield from self._source.accept((",",))):
                space = yield from self._source.skip()
        if closer == "}" and not (yield from self.at_end()):
            yield from self._source.skip()
        self._lead = None
        self._write(closed)

    def _member(self, schema: Schema) -> Step[bool]:
        """A key and its value; False: there is no more."""
        raw = yield from self._key()
        if raw is None:
            return False
        key = str(json.loads(raw, strict=False))
        space = yield from self._source.skip()
        if (yield from self._source.accept((":", "="))):
            space = yield from self._source.skip()
        elif not (yield from self.at_end()):
            return bool(key)
        self._lead = f"{self._lead or ''}{raw}:{space if self._dialect.separator == ':' else ' '}"
        if not (yield from self.value(schema.member(key), "}")) and not self.ended:
            self._write("null")
        return not self.ended

    def _key(self) -> Step[str | None]:
        """A key as JSON text; ``None`` if the text ends in it."""
        quote = yield from self._source.starts(self._dialect.quotes)
        if quote:
            text = yield from self._captured(self.string(self._dialect.separator, key=True))
            return None if self.ended else text
        count = yield from self._source.run(_BARE_KEY, _MAX_KEY)
        if count == _MAX_KEY or not (yield from self._source.ahead(count)):
            self.ended = True
            return None
        return dump(self._source.take(count).strip())

    def _token(self, schema: Schema) -> Step[None]:
        """A number, a literal or a bare word: everything up to what can follow a value."""
        count = 0
        while True:
            char = yield from self._source.ahead(count)
            if char == '"' and _is_json(self._source.peek(count).strip()):  # a comma is missing
                break
            if not char or char in ",}])\n" or (yield from self._source.starts(self._dialect.enders, count)):
                break
            count += 1
        word = self._source.take(count)
        trailing = word[len(word.rstrip()) :]
        text = word.strip()
        if not char:
            text = _completed(text)
        if text in ("null", "None"):
            self._write("null" + trailing)
        elif schema.types == {"string"}:
            self._write(dump(text) + trailing)
        elif _is_json(text) and schema.valid(json.loads(text)):
            self._write(text + trailing)
        else:
            word = "null" if text in _NOTHING else text.lower()
            found, parsed = (True, _WORDS[word]) if word in _WORDS else parse_literal(text)
            self._write(dump(schema.coerce(parsed if found else text)) + trailing)

    def string(self, closer: str, key: bool = False) -> Step[None]:
        """A string whose opening quote comes next; `closer` is what ends the object or array around it."""
        source = self._source
        quote = yield from source.accept(self._dialect.quotes)
        self._write('"')
        escapes = quote[0] in "\"'"
        plain = _IN_DOUBLE if quote == '"' else _IN_OTHER if escapes else _IN_RAW
        write: Callable[[str], None] = self._write
        held: list[str] = []
        mark: int | None = None
        while True:
            run = plain.match(source.text, source.pos)
            if run:
                write(source.take(run.end() - source.pos))
            char = yield from source.ahead()
            if not char:
                break
            if plain.match(char):
                continue
            if (yield from source.starts((quote,))):
                source.pos += len(quote)
                if (yield from self._closes(closer, key)):
                    if mark is not None:
                        source.unmark()
                    self._write("".join(held) + '"')
                    return
                write(escape(quote))
            elif mark is None and (yield from source.starts(self._dialect.enders)):
                mark, write = source.mark(), held.append
            elif mark is not None and (yield from source.starts(self._dialect.restart)):
                break
            else:
                yield from self._character(char, write, escapes=escapes)
        if mark is not None:
            source.rewind(mark)
        self.ended = True
        self._write('"')

    def _character(self, char: str, write: Callable[[str], None], *, escapes: bool) -> Step[None]:
        """`escapes`: between quotes of its own a format needs none."""
        source = self._source
        if char != "\\" or not escapes:
            source.take(1)
            write(escape(char))
            return
        after = yield from source.ahead(1)
        if not after:
            source.take(1)
        elif after in '"\\/bfnrt':
            write(source.take(2))
        elif after == "u":
            digits = yield from source.run(_HEX, 4, 2)
            write(source.take(6) if digits == 4 else "\\" + source.take(1))
        elif after == "'":
            source.take(2)
            write("'")
        else:
            source.take(1)
            write("\\\\")

    def _closes(self, closer: str, key: bool) -> Step[bool]:
        """Whether the quote just consumed ends the string: what comes next must be able to follow one."""
        source = self._source
        offset = yield from source.blank()
        char = yield from source.ahead(offset)
        if key:
            return char in ("", self._dialect.separator, ":", "=", ",", "}")
        if not char or char == closer or (yield from source.starts(self._dialect.enders, offset)):
            return True
        if char != ",":
            return not closer
        if closer != "}":
            return True
        offset = yield from source.blank(offset + 1)
        follow = yield from source.ahead(offset)
        if (
            not follow
            or follow == closer
            or follow in "\"'"
            or (yield from source.starts(self._dialect.enders, offset))
        ):
            return True
        word = yield from source.run(_WORD, _MAX_KEY, offset)  # a key without quotes
        return word > 0 and (yield from source.ahead((yield from source.blank(offset + word)))) in ("", ":")

    def at_end(self) -> Step[bool]:
        """The text, or the call's markup, ends here. Sets `ended`; it stays set."""
        if not self.ended:
            char = yield from self._source.ahead()
            self.ended = not char or bool((yield from self._source.starts(self._dialect.enders)))
        return self.ended


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=no_constant)
    except ValueError:
        return False
    return True


def _completed(text: str) -> str:
    """A scalar that the end of the text may have cut."""
    for word in ("true", "false", "null", "True", "False", "None"):
        if len(text) > 1 and word.startswith(text):
            return word
    while text and text[0] in "-0123456789" and not _is_json(text):
        text = text[:-1]
    return text


def mended(text: str, schema: Schema) -> str:
    """A whole JSON text, mended and coerced; ``""`` if it holds no value."""
    source = Source()
    source.push(text)
    source.closed = True
    written: list[str] = []
    for _ in JsonStream(source, written.append, Dialect()).value(schema):
        pass
    return "".join(written)
