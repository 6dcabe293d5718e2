"""Hermes JSON: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; also bare, in lists and in fences."""

from __future__ import annotations

from start_llm.parsing.calls import CallBuilder, NotACall
from start_llm.parsing.jsonstream import Dialect, JsonStream
from start_llm.parsing.schema import dump, parse_literal
from start_llm.parsing.source import WHITESPACE, Step
from start_llm.parsing.tools.base import ANYTHING, BlockReading, as_object
from start_llm.parsing.turntokens import LEAKED

_NAMES = ("name", "function", "tool", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "params")
_MAX_KEY = 40
JSON = Dialect(enders=("</tool_call>", *LEAKED), restart=("<tool_call>\n{", "<tool_call>{"))


def json_block(reading: BlockReading, dialect: Dialect = JSON) -> Step[None]:
    """One or more call objects, maybe in a list. The bracket is the next character."""
    source = reading.source
    listed = bool((yield from source.accept(("[",))))
    count = 0
    while True:
        yield from source.skip(WHITESPACE + ",;" if count else WHITESPACE)
        char = yield from source.ahead()
        if char != "{":
            break
        yield from json_call(reading, dialect)
        count += 1
    if listed and char == "]":
        source.take(1)
    if not count:
        raise NotACall


class _Parts:
    """What is known of a call object so far."""

    def __init__(self) -> None:
        self.call: CallBuilder | None = None
        self.ident: str | None = None
        self.early: list[str] = []  # arguments that came before the name
        self.others: dict[str, object] = {}
        self.done = False


def json_call(reading: BlockReading, dialect: Dialect = JSON) -> Step[None]:
    """One call object. Its name may come after its arguments."""
    source = reading.source
    source.take(1)
    parts = _Parts()
    complete = False
    while True:
        yield from source.skip(WHITESPACE + ",")
        char = yield from source.ahead()
        if char == "}":
            source.take(1)
            complete = True
            break
        if char not in ('"', "'"):
            break
        try:
            key = yield from _key(reading)
            if (
                key == "function" and (yield from source.ahead()) == "{"
            ):  # {"function": {"name": ..., "arguments": ...}}
                yield from json_call(reading, dialect)
                yield from source.skip()
                yield from source.accept(("}",))
                return
            if not (yield from _part(reading, parts, key, dialect)):
                break
        except NotACall:
            if parts.call is None:
                raise
            break
    yield from _finish(reading, parts, complete)


def _part(reading: BlockReading, parts: _Parts, key: str, dialect: Dialect) -> Step[bool]:
    """One member of the call object; False if the text ended in it."""
    if key in _NAMES and parts.call is None:
        parts.call = reading.calls.begin((yield from reading.name()), parts.ident)
        if parts.early:
            parts.call.write(_late(parts.early, parts.call))
            parts.done = True
    elif key in _ARGUMENTS and not parts.done and parts.call is not None:
        parts.done = True
        return (yield from reading.json_arguments(parts.call, dialect))
    elif key in _ARGUMENTS and not parts.done:
        yield from _value(reading, parts.early, dialect)
    else:
        text: list[str] = []
        yield from _value(reading, text, dialect)
        _, value = parse_literal("".join(text))
        if key == "id" and isinstance(value, str):
            parts.ident = value
        elif key != "type":
            parts.others[key] = value
    return True


def _finish(reading: BlockReading, parts: _Parts, complete: bool) -> Step[None]:
    call = parts.call
    if call is None:
        raise NotACall
    if not parts.done:  # no arguments, or arguments that stand beside the name
        call.write(dump(call.schema.coerce(parts.others)))
    while complete:  # one brace too many is common
        offset = yield from reading.source.blank()
        if (yield from reading.source.ahead(offset)) != "}":
            break
        reading.source.take(offset + 1)
    reading.finish(call, complete)


def _key(reading: BlockReading) -> Step[str]:
    quote = reading.source.take(1)
    key, end = yield from reading.source.until((quote,), _MAX_KEY)
    yield from reading.source.skip()
    if not end or not (yield from reading.source.accept((":",))):
        raise NotACall
    yield from reading.source.skip()
    return key


def _value(reading: BlockReading, held: list[str], dialect: Dialect) -> Step[None]:
    stream = JsonStream(reading.source, held.append, dialect)
    if not (yield from stream.value(ANYTHING, "}")) or stream.ended:
        raise NotACall


def _late(held: list[str], call: CallBuilder) -> str:
    found, value = parse_literal("".join(held))
    if found and isinstance(value, dict):
        from_schema = call.schema.coerce(value)
        if from_schema == value:
            return "".join(held)
    return as_object("".join(held), call)


def bare_json(reading: BlockReading) -> Step[None]:
    """A call object with no markup around it: only ``{"name": "<known>", "arguments|parameters": {``."""
    source = reading.source
    mark = source.mark()
    try:
        yield from _expect(reading, "{")
        yield from _expect(reading, '"name"')
        yield from _expect(reading, ":")
        yield from source.skip()
        if (yield from source.ahead()) != '"':
            raise NotACall
        name = yield from reading.name()
        if not reading.calls.knows(name):
            raise NotACall
        yield from _expect(reading, ",")
        yield from source.skip()
        if not (yield from source.accept(('"arguments"', '"parameters"'))):
            raise NotACall
        yield from _expect(reading, ":")
        yield from _expect(reading, "{")
    except NotACall:
        source.unmark(mark)
        raise
    source.rewind(mark)
    yield from json_call(reading)


def bare_objects(reading: BlockReading) -> Step[None]:
    """One such call, or several with commas or semicolons between them."""
    yield from bare_json(reading)
    while True:
        yield from reading.source.skip(WHITESPACE + ",;")
        if (yield from reading.source.ahead()) != "{":
            return
        yield from bare_json(reading)


def bare_list(reading: BlockReading) -> Step[None]:
    """Such calls in a JSON list."""
    yield from reading.source.accept(("[",))
    yield from bare_objects(reading)
    yield from reading.source.accept(("]",))


def _expect(reading: BlockReading, literal: str) -> Step[None]:
    yield from reading.source.skip()
    if not (yield from reading.source.accept((literal,))):
        raise NotACall
