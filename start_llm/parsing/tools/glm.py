"""GLM's calls: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, and LongCat's like it."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.core.messages import Tool
from start_llm.parsing.calls import MAX_NAME, NAME, CallBuilder, Calls, NotACall
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step, turn_ends
from start_llm.parsing.tools.base import Opener, ToolFormat
from start_llm.parsing.tools.hermes import json_block
from start_llm.parsing.tools.values import Trim, ValueEnd, ValueReader, ValueWriter

_MAX_KEY = 200


@dataclass(frozen=True)
class Arguments:
    """The markup of a family that writes keys and values in separate tags."""

    outer: tuple[str, str] = ("<tool_call>", "</tool_call>")
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")


GLM = Arguments()
LONGCAT = Arguments(
    ("<longcat_tool_call>", "</longcat_tool_call>"),
    ("<longcat_arg_key>", "</longcat_arg_key>"),
    ("<longcat_arg_value>", "</longcat_arg_value>"),
)


def keyed_call(calls: Calls, tags: Arguments = GLM) -> Step[None]:
    """A call whose name is what comes next. The outer end is consumed."""
    source = calls.source
    name = yield from source.span(NAME, MAX_NAME)
    yield from source.skip()
    follows = yield from source.starts((tags.key[0], tags.outer[1], *LEAKED))
    if not name:
        raise NotACall
    char = yield from source.ahead()
    if char == "{" and calls.knows(name):
        call = calls.begin(name)
        complete = yield from calls.json_arguments(call, Dialect(enders=(tags.outer[1], *LEAKED)))
    elif follows == tags.key[0] or (follows and calls.knows(name)):
        call = calls.begin(name)
        complete = yield from _arguments(calls, call, tags)
    else:
        raise NotACall
    yield from source.skip()
    closed = yield from source.accept((tags.outer[1],))
    calls.finish(call, complete and bool(closed))


def _arguments(calls: Calls, call: CallBuilder, tags: Arguments) -> Step[bool]:
    source = calls.source
    complete = True
    while complete:
        yield from source.skip()
        if not (yield from source.accept((tags.key[0],))):
            break
        key, end = yield from source.until((tags.key[1], tags.value[0]), _MAX_KEY)
        if not end:
            complete = False
            break
        yield from source.skip()
        yield from source.accept((tags.value[0],))
        call.key(key.strip())
        complete = yield from _value(calls, call, tags, key.strip())
    call.end_keys()
    return complete


def _value(calls: Calls, call: CallBuilder, tags: Arguments, key: str) -> Step[bool]:
    def plausible(tag: str) -> Step[bool]:
        return _ends_value(calls, call, tags, tag)

    close = ValueEnd(
        tags=(tags.value[1],),
        followers=(tags.key[0], *tags.outer),
        breaks=(tags.key[0], tags.outer[1]),
        restart=(tags.outer[0],),
        anywhere=True,
    )
    writer = ValueWriter(call, call.schema.member(key), Trim.PAIR)
    return (yield from ValueReader(calls.source, close, writer, plausible).read_value())


def _ends_value(calls: Calls, call: CallBuilder, tags: Arguments, tag: str) -> Step[bool]:
    """Whether markup inside a value shows that the value's closing tag is missing."""
    source = calls.source
    if tag == tags.key[0]:
        return bool((yield from source.starts([f"{tag}{key}{tags.key[1]}" for key in call.schema.keys])))
    again = tuple(f"{tags.outer[0]}{space}{name}" for name in calls.names for space in ("", "\n"))
    if tag == tags.outer[0]:
        return bool((yield from source.starts(again)))
    return (yield from turn_ends(source, len(tag), again))


def bare_openers(tool: Tool) -> tuple[Opener, ...]:
    """The legacy form, without the opening tag: a known tool's name right before ``<arg_key>``."""
    return tuple(
        Opener(f"{tool.name}{space}{GLM.key[0]}", keyed_call, keep=True, known_only=True) for space in ("", "\n", " ")
    )


def _longcat(calls: Calls) -> Step[None]:
    yield from calls.source.skip()
    if (yield from calls.source.ahead()) == "{":
        yield from json_block(calls, Dialect(enders=(LONGCAT.outer[1], *LEAKED)))
    else:
        yield from keyed_call(calls, LONGCAT)


LONGCAT_FORMAT = ToolFormat("longcat", (Opener(LONGCAT.outer[0], _longcat),), (LONGCAT.outer[1], LONGCAT.value[1]))
