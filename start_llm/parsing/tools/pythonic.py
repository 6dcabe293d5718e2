"""Calls as Python: ``[name(key="text", other=1)]``, and Llama's ``<|python_tag|>name.call(key="text")``."""

from __future__ import annotations

import re

from start_llm.parsing.calls import MAX_NAME, NAME, CallBuilder, Calls, NotACall, Opener, Parse, ToolFormat
from start_llm.parsing.jsonstream import Dialect, JsonStream
from start_llm.parsing.schema import ANYTHING
from start_llm.parsing.source import LEAKED, WHITESPACE, Step, turn_ends
from start_llm.parsing.tools.hermes import bare_objects, json_block

_QUOTES = ('"""', "'''", '"', "'")
_WORD = re.compile(r"\w")
_VALUE_STARTS = "\"'[{-0123456789"


def _block(start: str, end: str) -> Parse:
    enders = tuple(text for text in (end, *LEAKED) if text)
    python = _dialect(enders, f"{start}[")
    objects = Dialect(enders=enders, restart=(f"{start}{{", f"{start}[{{"))

    def parse(calls: Calls) -> Step[None]:
        source = calls.source
        yield from source.skip()
        if (yield from _is_json(calls)):
            yield from json_block(calls, objects)
        else:
            yield from _list(calls, python)
        yield from source.after_space(*([end] if end else []))

    return parse


def _dialect(enders: tuple[str, ...], *restart: str) -> Dialect:
    return Dialect(separator="=", quotes=_QUOTES, enders=enders, restart=restart)


def _is_json(calls: Calls) -> Step[bool]:
    char = yield from calls.source.ahead()
    if char == "[":
        char = yield from calls.source.ahead((yield from calls.source.blank(1)))
    return char == "{"


def _list(calls: Calls, dialect: Dialect) -> Step[None]:
    """Calls with or without brackets around them."""
    source = calls.source
    yield from source.accept(("[",))
    gap = WHITESPACE
    while True:
        yield from source.skip(gap)
        if gap != WHITESPACE and not NAME.match((yield from source.ahead()) or " "):
            break
        name = yield from source.span(NAME, MAX_NAME)
        if not name or not (yield from source.accept(("(",))):
            raise NotACall
        call = calls.begin(name)
        complete = yield from _arguments(calls, call, dialect)
        call.finish(complete)
        gap = WHITESPACE + ",;"
    yield from source.accept(("]",))


def _arguments(calls: Calls, call: CallBuilder, dialect: Dialect) -> Step[bool]:
    """Arguments by keyword or in the tool's order, and ``)``. False if something is missing, or had to be left out."""
    source = calls.source
    stream = JsonStream(source, call.write, dialect)
    free = iter(call.schema.keys)
    clean = closed = True
    while True:
        yield from source.skip(WHITESPACE + ",")
        char = yield from source.ahead()
        word = yield from source.run(_WORD, MAX_NAME)
        # A turn that ends in a bare word: nobody knows whether it was to be a key.
        if (yield from stream.at_end()) or char in ")]}" or (word and (yield from turn_ends(source, word))):
            closed = bool((yield from source.accept((")",))))
            break
        key = yield from _keyword(calls)
        if not key:
            key = next((key for key in free if key not in call.keys), "")
        if not key or key in call.keys:
            clean = False
            yield from JsonStream(source, lambda text: None, dialect).value(ANYTHING, ")")
            continue
        call.key(key)
        if not (yield from stream.value(call.schema.member(key), ")")):
            call.write("null")
    call.end_keys()
    return clean and closed and not stream.ended


def _keyword(calls: Calls) -> Step[str]:
    """Consumes ``key=``; ``""`` if the next argument has none."""
    source = calls.source
    length = yield from calls.source.run(_WORD, MAX_NAME)
    offset = yield from source.blank(length)
    if not length or (yield from source.ahead(offset)) != "=" or (yield from source.ahead(offset + 1)) == "=":
        return ""
    key = source.take(length)
    source.take(offset + 1 - length)
    return key


def bare_calls(calls: Calls) -> Step[None]:
    """A list of calls without any markup: it must begin with a known tool, and an argument that may be one of its."""
    source = calls.source
    if (yield from _is_json(calls)):
        yield from bare_objects(calls)
        return
    with source.lookahead():
        yield from source.accept(("[",))
        yield from source.skip()
        name = yield from source.span(NAME, MAX_NAME)
        if not calls.knows(name) or not (yield from source.accept(("(",))):
            raise NotACall
        yield from source.skip()
        char = yield from source.ahead()
        keys = calls.schemas[name].keys
        if char == ")":
            follow = yield from source.ahead((yield from source.blank(1)))
            sound = follow in ("]", ",")
        elif char and char in _VALUE_STARTS:
            sound = bool(keys)
        else:
            key = yield from _keyword(calls)
            sound = bool(key) and (not keys or key in keys)
        if not sound:
            raise NotACall
    yield from _list(calls, _BARE)


_BARE = _dialect(LEAKED)

PYTHONIC = ToolFormat(
    "pythonic",
    (Opener("<|tool_call_start|>", _block("<|tool_call_start|>", "<|tool_call_end|>")),),
    ("<|tool_call_end|>",),
)
LLAMA = ToolFormat(
    "llama",
    (
        Opener("<|python_tag|>", _block("<|python_tag|>", "")),
        Opener("<|python_start|>", _block("<|python_start|>", "<|python_end|>")),
        Opener("[\n", bare_calls, keep=True, known_only=True, line_start=True),
    ),
    ("<|python_end|>",),
    lambda tool: (Opener(f"[{tool.name}(", bare_calls, keep=True, known_only=True, line_start=True),),
)
