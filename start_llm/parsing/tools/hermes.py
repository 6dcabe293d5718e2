"""Calls as JSON (Hermes), and what is recognised whatever the model's family.

Hermes writes ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; it also comes bare, in lists and in fences.
Such a block may hold Qwen's XML, GLM's keys and values, and GLM-4's ``<name>``/``<arguments>`` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from start_llm.core.messages import Tool
from start_llm.parsing.calls import MAX_NAME, CallBuilder, Calls, NotACall, Opener, ToolFormat, as_object
from start_llm.parsing.jsonstream import Dialect, JsonStream
from start_llm.parsing.schema import ANYTHING, dump, parse_literal
from start_llm.parsing.source import LEAKED, WHITESPACE, Source, Step
from start_llm.parsing.tools.tagged import GLM, IFM, LONGCAT_TAGS, QWEN, Tags, keyed

_NAMES = ("name", "function", "tool", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "params")
_MAX_KEY = 40
OPEN, CLOSE = GLM.outer
_MAX_FENCE = 20
JSON = Dialect(enders=("</tool_call>", *LEAKED), restart=("<tool_call>\n{", "<tool_call>{"))


type ReadCall = Callable[[Calls, Dialect], Step[None]]


def json_block(calls: Calls, dialect: Dialect = JSON, read: ReadCall | None = None) -> Step[None]:
    """One or more call objects, maybe in a list, each by `read` (`json_call`). The bracket is the next character."""
    source = calls.source
    listed = bool((yield from source.accept(("[",))))
    count = 0
    while True:
        yield from source.skip(WHITESPACE + ",;" if count else WHITESPACE)
        char = yield from source.ahead()
        if char != "{":
            break
        yield from (read or json_call)(calls, dialect)
        count += 1
    if listed and char == "]":
        source.take(1)
    if not count:
        raise NotACall


@dataclass
class _Parts:
    """What is known of a call object so far. `early`: arguments that came before the name."""

    call: CallBuilder | None = None
    ident: str | None = None
    early: str = ""
    others: dict[str, object] = field(default_factory=dict)
    has_arguments: bool = False


def json_call(calls: Calls, dialect: Dialect = JSON) -> Step[None]:
    """One call object. Its name may come after its arguments."""
    source = calls.source
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
            key = yield from _key(calls)
            if key == "function" and (yield from source.ahead()) == "{":  # around the name and the arguments
                yield from json_call(calls, dialect)
                yield from source.after_space("}")
                return
            if not (yield from _part(calls, parts, key, dialect)):
                break
        except NotACall:
            if parts.call is None:
                raise
            break
    if parts.call is None:
        raise NotACall
    if not parts.has_arguments:  # or they stand beside the name
        parts.call.write(dump(parts.call.schema.coerce(parts.others)))
    while complete and (yield from source.after_space("}")):  # one brace too many is common
        pass
    parts.call.finish(complete)


def _part(calls: Calls, parts: _Parts, key: str, dialect: Dialect) -> Step[bool]:
    """One member of the call object; False if the text ended in it."""
    if key in _NAMES and parts.call is None:
        parts.call = calls.begin((yield from calls.name()), parts.ident)
        if parts.early:
            parts.call.write(as_object(parts.early, parts.call.schema))
            parts.has_arguments = True
    elif key in _ARGUMENTS and not parts.has_arguments and parts.call is not None:
        parts.has_arguments = True
        return (yield from parts.call.json_arguments(dialect))
    elif key in _ARGUMENTS and not parts.has_arguments:
        parts.early += yield from _value(calls, dialect)
    else:
        _, value = parse_literal((yield from _value(calls, dialect)))
        if key == "id" and isinstance(value, str):
            parts.ident = value
        elif key != "type":
            parts.others[key] = value
    return True


def _key(calls: Calls) -> Step[str]:
    quote = calls.source.take(1)
    key, end = yield from calls.source.until((quote,), _MAX_KEY)
    if not end or not (yield from calls.source.after_space(":")):
        raise NotACall
    yield from calls.source.skip()
    return key


def _value(calls: Calls, dialect: Dialect) -> Step[str]:
    held: list[str] = []
    stream = JsonStream(calls.source, held.append, dialect)
    if not (yield from stream.value(ANYTHING, "}")) or stream.ended:
        raise NotACall
    return "".join(held)


def bare_json(calls: Calls, dialect: Dialect = JSON) -> Step[None]:
    """A call object with no markup around it: only ``{"name": "<known>", "arguments|parameters": {``."""
    source = calls.source
    with source.lookahead():
        for literal in ("{", '"name"', ":"):
            yield from _expect(calls, literal)
        yield from source.skip()
        if (yield from source.ahead()) != '"' or not calls.knows((yield from calls.name())):
            raise NotACall
        yield from _expect(calls, ",")
        yield from _expect(calls, '"arguments"', '"parameters"')
        for literal in (":", "{"):
            yield from _expect(calls, literal)
    yield from json_call(calls, dialect)


bare_objects = partial(json_block, read=bare_json)


def _expect(calls: Calls, *literals: str) -> Step[None]:
    if not (yield from calls.source.after_space(*literals)):
        raise NotACall


# --- blocks whose markup several families share ---


def open_fence(source: Source) -> Step[str]:
    """Consumes the fence that stands here, with the rest of its line, and the white space behind it.

    Returns the fence; ``""`` if none stands here, and nothing is consumed then.
    """
    fence = yield from source.accept(("```",))
    if fence:
        yield from source.until(("\n",), _MAX_FENCE)
        yield from source.skip()
    return fence


def tool_call_block(calls: Calls) -> Step[None]:
    """What follows ``<tool_call>``."""
    source = calls.source
    while (yield from source.after_space(OPEN, *LEAKED)):
        pass
    fence = yield from open_fence(source)
    char = yield from source.ahead()
    if char and char in "{[":
        yield from json_block(calls)
    elif (yield from source.starts((QWEN.call[0],))):
        yield from QWEN.read_block(calls)
    elif (yield from source.accept(("<name>",))):
        yield from _named(calls)
    else:
        yield from GLM.read_keyed(calls)
    if fence:
        yield from source.after_space(fence)
        calls.settle()


def _named(calls: Calls) -> Step[None]:
    """GLM-4: ``<name>fn</name><arguments>{...}</arguments>``."""
    source = calls.source
    yield from source.skip()
    name = yield from calls.name()
    if not (yield from source.after_space("</name>")):
        raise NotACall
    call = calls.begin(name)
    if (yield from source.after_space("<arguments>")):
        dialect = Dialect(enders=("</arguments>", *JSON.enders), restart=JSON.restart)
        complete = yield from call.json_arguments(dialect)
        yield from call.finish_behind("</arguments>", complete)
    else:
        call.write("{}")
        call.finish(True)


def fenced_json(calls: Calls) -> Step[None]:
    """A call object in a fence, which is all that some small models say."""
    yield from bare_json(calls)
    yield from calls.source.after_space("```")
    calls.settle()


def keyed_openers(tool: Tool) -> tuple[Opener, ...]:
    """GLM's legacy form, without the opening tag: a known tool's name right before ``<arg_key>``."""
    return tuple(
        Opener(f"{tool.name}{space}{GLM.param[0]}", GLM.read_keyed, keep=True, known_only=True)
        for space in ("", "\n", " ")
    )


SHARED = ToolFormat(
    id="shared",
    openers=(
        Opener(OPEN, tool_call_block),
        Opener("<function=", QWEN.read_call, keep=True),
        Opener("{", bare_objects, keep=True, known_only=True, line_start=True),
        Opener("[{", bare_objects, keep=True, known_only=True, line_start=True),
        Opener("[\n", bare_objects, keep=True, known_only=True, line_start=True),
        Opener("```json\n", fenced_json, known_only=True, line_start=True, first=True),
        Opener("```\n", fenced_json, known_only=True, line_start=True, first=True),
    ),
    closers=(CLOSE, "</function>", "</parameter>", "</arg_value>", "</arguments>"),
    per_tool=keyed_openers,
)


def _keyed_calls(calls: Calls, tags: Tags, end: str = "") -> Step[None]:
    """Calls between `tags.outer`, each with keys and values or as JSON, and the `end` of all."""
    source, count = calls.source, 0
    while (yield from source.after_space(tags.outer[0])):
        yield from source.skip()
        if (yield from source.ahead()) == "{":
            yield from json_block(calls, Dialect(enders=(tags.outer[1], *LEAKED)))
            yield from source.after_space(tags.outer[1])
        else:
            yield from tags.read_keyed(calls)
        count += 1
    if not count:
        raise NotACall
    yield from source.after_space(end)


def _suffixed_calls(calls: Calls) -> Step[None]:
    """What follows ``<tool_calls``. All tags end in the checkpoint's own way (``<tool_call:opensource>``)."""
    suffix, end = yield from calls.source.until((">",), MAX_NAME)
    if not end or not (suffix == "" or suffix.startswith(":")):
        raise NotACall
    yield from _keyed_calls(calls, keyed("", suffix), f"</tool_calls{suffix}>")


LONGCAT = ToolFormat(
    "longcat",
    (Opener(LONGCAT_TAGS.outer[0], partial(_keyed_calls, tags=LONGCAT_TAGS), keep=True),),
    (LONGCAT_TAGS.outer[1], LONGCAT_TAGS.param[1]),
)
HY_V4 = ToolFormat("hy_v4", (Opener("<tool_calls", _suffixed_calls),))
_IFM_END = "</ifm|tool_calls>"
K2_HORIZON = ToolFormat(
    "k2_horizon",
    (
        Opener("<ifm|tool_calls>", partial(_keyed_calls, tags=IFM, end=_IFM_END)),
        Opener(IFM.outer[0], partial(_keyed_calls, tags=IFM), keep=True),
    ),
    (_IFM_END, IFM.outer[1], IFM.param[1]),
)


def _inkling(calls: Calls) -> Step[None]:
    """``<|content_invoke_tool_json|>{"name": ..., "args": {...}}<|end_message|>``, behind the tool's name."""
    source = calls.source
    yield from source.until((_INKLING,), 2 * MAX_NAME)
    yield from source.skip()
    if (yield from source.ahead()) != "{":
        raise NotACall
    yield from json_call(calls, Dialect(enders=("<|end_message|>", *LEAKED)))
    yield from source.after_space("<|end_message|>")


_INKLING = "<|content_invoke_tool_json|>"
INKLING = ToolFormat(
    "inkling",
    (Opener(_INKLING, _inkling, keep=True),),
    per_tool=lambda tool: (Opener(f"{tool.name}{_INKLING}", _inkling, keep=True),),
)
