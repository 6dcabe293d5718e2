"""What every tool-call format is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.messages import Tool
from start_llm.parsing.calls import CallBuilder, CallLog, NotACall
from start_llm.parsing.jsonstream import Dialect, JsonStream, mended
from start_llm.parsing.schema import Schema, dump, parse_literal
from start_llm.parsing.source import Source, Step

NAME = re.compile(r"[\w.\-:/]")
MAX_NAME = 128
ANYTHING = Schema({})


class BlockReading:
    """One block of calls being read.

    `settled` is called after each call: what was read so far is not given back any more.
    """

    def __init__(self, source: Source, calls: CallLog, settled: Callable[[], None]) -> None:
        self.source = source
        self.calls = calls
        self.settled = settled

    def name(self) -> Step[str]:
        """A tool's name, in quotes or bare. Raises NotACall if none stands here."""
        quote = yield from self.source.accept(('"', "'"))
        name = yield from self.source.span(NAME, MAX_NAME)
        if not name or (quote and not (yield from self.source.accept((quote,)))):
            raise NotACall
        return name

    def finish(self, call: CallBuilder, complete: bool) -> None:
        call.finish(complete)
        self.settled()

    def json_arguments(self, call: CallBuilder, dialect: Dialect) -> Step[bool]:
        """The arguments as a JSON object (or one inside a JSON string). Gives whether they ended as they should."""
        source = self.source
        yield from source.skip()
        char = yield from source.ahead()
        if char == "{":
            stream = JsonStream(source, call.write, dialect)
            yield from stream.value(call.schema)
            return not stream.ended
        held: list[str] = []
        stream = JsonStream(source, held.append, dialect)
        yield from stream.value(ANYTHING)
        call.write(as_object("".join(held), call))
        return not stream.ended


def as_object(text: str, call: CallBuilder) -> str:
    """Arguments that are not an object, as one: parsed if they hold one as a string, else under the only key."""
    found, value = parse_literal(text)
    if found and isinstance(value, str):
        inner, parsed = parse_literal(value)
        if inner and isinstance(parsed, dict):
            value = parsed
        elif value.lstrip().startswith("{"):
            return mended(value, call.schema)
    if not found or value in (None, "", []):
        return "{}"
    if isinstance(value, dict):
        return dump(call.schema.coerce(value))
    keys = call.schema.keys
    return dump(call.schema.coerce({keys[0] if len(keys) == 1 else "input": value}))


Parse = Callable[[BlockReading], Step[None]]


def section(begin: str, end: str, call: str, parse: Parse) -> Parse:
    """Reads calls of which each begins with `call` and all stand between `begin` and `end`.

    Args:
        parse: reads one call, from behind `call`.
    """

    def block(reading: BlockReading) -> Step[None]:
        source = reading.source
        count = 0
        while True:
            yield from source.skip()
            opened = yield from source.accept((call, begin))
            if opened == begin:
                continue
            if count and not opened:
                break
            yield from parse(reading)
            count += 1
        yield from source.accept((end,))

    return block


@dataclass(frozen=True)
class Opener:
    """Text that may begin a block of calls.

    Attributes:
        text: the literal.
        parse: reads the block. Starts after `text`, or on it if `keep`. Raises NotACall
            if it is none; what was read since the last `settled` is then text.
        known_only: only calls of known tools count, since nothing else marks this as one.
        line_start: only at the start of a line.
        first: only where nothing visible was said before.
    """

    text: str
    parse: Parse
    keep: bool = False
    known_only: bool = False
    line_start: bool = False
    first: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    Attributes:
        openers: see Opener.
        closers: markup that is dropped where it stands alone after a call.
        per_tool: further openers that contain the tool's name.
    """

    id: str
    openers: tuple[Opener, ...] = ()
    closers: tuple[str, ...] = ()
    per_tool: Callable[[Tool], Sequence[Opener]] | None = None


@dataclass(frozen=True)
class ExternalFormat:
    """A parser from elsewhere (mlx-lm's ``tool_parsers``), for formats that have no reader of ours.

    Attributes:
        start, end: the block's markers; `end` may be ``""``: the block then runs to the end of the text.
        parse: (text between the markers, OpenAI tool definitions) -> ``{"name", "arguments"}`` or a list of
            them; raises anything where the text is no call.
    """

    start: str
    end: str
    parse: Callable[[str, Any], dict[str, Any] | list[dict[str, Any]]] = field(compare=False)
