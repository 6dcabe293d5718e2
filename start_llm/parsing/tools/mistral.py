"""Mistral: ``[TOOL_CALLS]name[ARGS]{...}``, repeated, or ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``."""

from __future__ import annotations

from start_llm.parsing.calls import MAX_NAME, NAME, Calls, NotACall
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step
from start_llm.parsing.tools.base import Opener, ToolFormat
from start_llm.parsing.tools.hermes import json_block

_OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_JSON = Dialect(enders=(_OPEN, *LEAKED))


def _block(calls: Calls) -> Step[None]:
    source = calls.source
    while True:
        yield from source.skip()
        if not (yield from source.accept((_OPEN,))):
            break
    if (yield from source.ahead()) in ("[", "{"):
        yield from json_block(calls, _JSON)
        return
    yield from _call(calls)
    while (yield from _another(calls)):
        yield from _call(calls)


def _call(calls: Calls) -> Step[None]:
    source = calls.source
    name = yield from source.span(NAME, MAX_NAME)
    yield from source.skip()
    ident = ""
    if (yield from source.accept((_ID,))):
        ident = yield from source.span(NAME, MAX_NAME)
        yield from source.skip()
    if not name or not (yield from source.accept((_ARGS,))):
        raise NotACall
    call = calls.begin(name, ident or None)
    complete = yield from calls.json_arguments(call, _JSON)
    calls.finish(call, complete)


def _another(calls: Calls) -> Step[bool]:
    """Whether a further call comes, with or without its own opening."""
    source = calls.source
    mark = source.mark()
    yield from source.skip(" \t\r\n,;")
    yield from source.accept((_OPEN,))
    yield from source.skip()
    start = source.mark()
    name = yield from source.span(NAME, MAX_NAME)
    yield from source.skip()
    found = bool(name and (yield from source.starts((_ID, _ARGS))))
    source.rewind(start)
    if found:
        source.unmark(mark)
    else:
        source.rewind(mark)
    return found


MISTRAL = ToolFormat("mistral", (Opener(_OPEN, _block),))
