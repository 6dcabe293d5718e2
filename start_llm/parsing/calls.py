"""Tool calls of one answer: what formats read (`Calls`) becomes events, with ids. Knows no format and no model.

A format is a `ToolFormat`.

Text that looked like a call and is none is given back to the source (`NotACall`). Two equal calls are two calls. One
exception: a call inside reasoning was only planned there if the same one comes again behind the block, without an id.
It is passed on once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from start_llm.core.events import ToolCallDelta, ToolCallFinished, ToolCallStarted
from start_llm.core.messages import Tool, ToolCall, call_ids
from start_llm.parsing.jsonstream import Dialect, JsonStream, mended
from start_llm.parsing.output import EventBuffer
from start_llm.parsing.schema import ANYTHING, Schema, dump, parse_literal
from start_llm.parsing.source import Source, Step

type Parse = Callable[[Calls], Step[None]]
"""Reads one block of calls. Raises NotACall: what was read since the last finished call is text."""

NAME = re.compile(r"[\w.\-:/]")
MAX_NAME = 128


class NotACall(Exception):
    """What looked like a call is none: its text is given back. Raised before any event of that call."""


class CallBuilder:
    """One call being written.

    It is held until it is complete if it may still turn out to be text (its tool is unknown), or one that was planned.

    `keys` are those of the arguments, as far as `key` has written them; `tools` the names of all tools.
    """

    def __init__(self, calls: Calls, name: str, ident: str | None) -> None:
        self.name = name
        self.schema = calls.schemas.get(name, ANYTHING)
        self.source, self.tools = calls.source, tuple(calls.schemas)
        self._calls = calls
        self._ident = ident
        self.keys: set[str] = set()
        self._arguments: list[str] = []
        self._index = -1
        if calls.knows(name) and (ident or not calls.has_planned(name)):
            self._start()

    def write(self, fragment: str) -> None:
        """The next piece of the arguments' JSON text."""
        if not fragment:
            return
        self._arguments.append(fragment)
        if self._index >= 0:
            self._calls.emit(ToolCallDelta(self._index, fragment, self._calls.choice))

    def key(self, key: str) -> None:
        """The key of the next argument, for formats that give them one by one; its value is written next."""
        self.write(("{" if not self.keys else ", ") + dump(key) + ": ")
        self.keys.add(key)

    def end_keys(self) -> None:
        self.write("}" if self.keys else "{}")

    def json_arguments(self, dialect: Dialect) -> Step[bool]:
        """The arguments as a JSON object (or one inside a JSON string). Gives whether they ended as they should."""
        yield from self.source.skip()
        is_object = (yield from self.source.ahead()) == "{"
        held: list[str] = []
        stream = JsonStream(self.source, self.write if is_object else held.append, dialect)
        yield from stream.value(self.schema if is_object else ANYTHING)
        if not is_object:
            self.write(as_object("".join(held), self.schema))
        return not stream.ended

    def finish(self, complete: bool) -> None:
        """The arguments are valid JSON now. Raises NotACall if the tool is unknown and the markup not complete."""
        if not self._calls.knows(self.name) and not complete:
            raise NotACall
        if self._index >= 0 or not self._calls.drop_planned(self.name, "".join(self._arguments)):
            if self._index < 0:
                self._start()
            self.cut()
        self._calls.settle()

    def finish_behind(self, end: str, complete: bool) -> Step[None]:
        """`finish`; without the markup `end` the call is not complete."""
        closed = yield from self.source.after_space(end)
        self.finish(complete and bool(closed))

    def cut(self) -> None:
        """The call ends as it is. One that the client has not been told of is dropped."""
        if self._index >= 0:
            self._calls.add(self._index, ToolCall(self._ident or "", self.name, "".join(self._arguments)))

    def _start(self) -> None:
        self._index, self._ident = self._calls.start(self.name, self._ident)
        text = "".join(self._arguments)
        if text:
            self._calls.emit(ToolCallDelta(self._index, text, self._calls.choice))


class Calls:
    """The calls of one choice, in order, and how formats read them from the source. One thread.

    Args:
        on_call: called before a call's first event, and when one was dropped.

    Attributes:
        schemas: of the arguments, by the tool's name.
        finished: the calls so far. `dropped` were left out, since they had been planned.
        reading: a block, or the header of one, is being read.
    """

    def __init__(self, source: Source, tools: Sequence[Tool], buffer: EventBuffer, on_call: Callable[[], None]) -> None:
        self.source = source
        self.emit = buffer.emit
        self.choice = buffer.choice
        self.finished: list[ToolCall] = []
        self.dropped = 0
        self.reading = False
        self._on_call, self._new_id = on_call, call_ids()
        self.schemas = {tool.name: Schema(tool.parameters) for tool in tools}
        self._ids: set[str] = set()
        self._open: CallBuilder | None = None
        self._known_only = self._in_reasoning = False
        self._thought: list[ToolCall] = []
        self._planned: list[tuple[str, str]] = []
        self._mark: int | None = None  # where the source goes back to if this is no call
        self._any_begun = False

    def read_block(
        self, parse: Parse, *, skip: int = 0, known_only: bool = False, in_reasoning: bool = False
    ) -> Step[bool]:
        """Read a block of calls. False, and nothing consumed, if it is none.

        `skip` characters of the opener are not for `parse`. With `known_only` calls of unknown tools do not count.
        """
        self._known_only = known_only
        self._in_reasoning = in_reasoning
        self._open = None
        self._mark = self.source.mark()
        self._any_begun = False
        self.reading = True
        self.source.pos += skip
        try:
            yield from parse(self)
        except NotACall:
            if self._mark is not None:
                self.source.rewind(self._mark)
            return self._any_begun
        finally:
            self.reading = False
        self._unmark()
        return True

    def cut(self) -> None:
        """The answer ended inside a block: the call stays as it is, so that nobody takes it for complete."""
        if self._open is not None:
            self._open.cut()

    def reasoning_closed(self) -> None:
        """A closing tag of reasoning: calls that stood before it may have been plans."""
        self._planned += [(call.name, call.arguments) for call in self._thought]
        self._thought.clear()

    def knows(self, name: str) -> bool:
        return name in self.schemas

    def begin(self, name: str, ident: str | None = None) -> CallBuilder:
        """Raises NotACall where only known tools count and this is none."""
        plain = name.removeprefix("functions.").removesuffix(".call")  # in its family's namespace
        name = plain if self.knows(plain) and not self.knows(name) else name
        if not name or (self._known_only and not self.knows(name)):
            raise NotACall
        self._open = CallBuilder(self, name, ident)
        return self._open

    def settle(self) -> None:
        """What was read so far is not given back any more."""
        self._open = None
        self._unmark()
        self._mark = self.source.mark()

    def name(self) -> Step[str]:
        """A tool's name, in quotes or bare. Raises NotACall if none stands here."""
        quote = yield from self.source.accept(('"', "'"))
        name = yield from self.source.span(NAME, MAX_NAME)
        if not name or (quote and not (yield from self.source.accept((quote,)))):
            raise NotACall
        return name

    def start(self, name: str, ident: str | None) -> tuple[int, str]:
        """The call's index and its id: `ident`, unless another call has it."""
        if not ident or ident in self._ids:
            ident = self._new_id()
        self._ids.add(ident)
        self._tell()
        self.emit(ToolCallStarted(len(self.finished), ident, name, self.choice))
        return len(self.finished), ident

    def add(self, index: int, call: ToolCall) -> None:
        self.finished.append(call)
        self._thought += [call] if self._in_reasoning else []
        self.emit(ToolCallFinished(index, call.id, call.name, call.arguments, self.choice))

    def has_planned(self, name: str) -> bool:
        return any(name == planned for planned, _ in self._planned)

    def drop_planned(self, name: str, arguments: str) -> bool:
        """Whether this call was planned, and so passed on already."""
        if (name, arguments) not in self._planned:
            return False
        self._planned.remove((name, arguments))
        self.dropped += 1
        self._tell()
        return True

    def _tell(self) -> None:
        self._unmark()
        self._any_begun = True
        self._on_call()

    def _unmark(self) -> None:
        if self._mark is not None:
            self.source.unmark()
        self._mark = None


def as_object(text: str, schema: Schema) -> str:
    """Arguments as an object: as they were written, if that is one which the schema allows; parsed, if they hold one as
    a string; else under the only key."""
    found, value = parse_literal(text)
    if isinstance(value, dict) and schema.coerce(value) == value:
        return text
    if found and isinstance(value, str):
        inner, parsed = parse_literal(value)
        if inner and isinstance(parsed, dict):
            value = parsed
        elif value.lstrip().startswith("{"):
            return mended(value, schema)
    if not found or value in (None, "", []):
        return "{}"
    if isinstance(value, dict):
        return dump(schema.coerce(value))
    return dump(schema.coerce({schema.keys[0] if len(schema.keys) == 1 else "input": value}))


# --- what a format is made of ---


@dataclass(frozen=True)
class Opener:
    """Text that may begin a block of calls."""

    text: str
    parse: Parse  # reads the block, from behind `text`, or from its beginning if `keep`
    keep: bool = False
    known_only: bool = False  # only calls of known tools count, since nothing else marks this as one
    line_start: bool = False  # only at the start of a line
    first: bool = False  # only where nothing visible was said before


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    `closers` are markup that is dropped where it stands alone after a call; `per_tool` gives further openers that
    contain the tool's name.
    """

    id: str
    openers: tuple[Opener, ...] = ()
    closers: tuple[str, ...] = ()
    per_tool: Callable[[Tool], Sequence[Opener]] = lambda tool: ()

    def openers_for(self, tools: Sequence[Tool]) -> list[Opener]:
        return [*(opener for tool in tools for opener in self.per_tool(tool)), *self.openers]
