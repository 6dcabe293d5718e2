"""Calls as Python: ``[name(key="text", other=1)]``, and Llama's ``<|python_tag|>name.call(key="text")``."""

from __future__ import annotations

from start_llm.parsing.calls import NotACall
from start_llm.parsing.jsonstream import Dialect, JsonStream
from start_llm.parsing.source import Step
from start_llm.parsing.tools.base import MAX_NAME, NAME, Opener, Parse, Reading, ToolFormat
from start_llm.parsing.tools.hermes import json_block
from start_llm.parsing.turntokens import LEAKED


def _block(start: str, end: str) -> Parse:
    enders = tuple(text for text in (end, *LEAKED) if text)
    python = Dialect(separator="=", enders=enders, restart=(start,))
    objects = Dialect(enders=enders, restart=(start,))

    def parse(reading: Reading) -> Step[None]:
        source = reading.source
        yield from source.skip()
        if (yield from _is_json(reading)):
            yield from json_block(reading, objects)
        else:
            yield from source.accept(("[",))
            yield from _calls(reading, python)
            yield from source.accept(("]",))
        yield from source.skip()
        if end:
            yield from source.accept((end,))

    return parse


def _is_json(reading: Reading) -> Step[bool]:
    char = yield from reading.source.ahead()
    if char == "[":
        char = yield from reading.source.ahead((yield from reading.source.blank(1)))
    return char == "{"


def _calls(reading: Reading, dialect: Dialect) -> Step[None]:
    source = reading.source
    count = 0
    while True:
        yield from source.skip(" \t\r\n,;" if count else " \t\r\n")
        if count and not NAME.match((yield from source.ahead()) or " "):
            return
        name = yield from source.span(NAME, MAX_NAME)
        if not name or not (yield from source.accept(("(",))):
            raise NotACall
        call = reading.calls.begin(name)
        stream = JsonStream(source, call.write, dialect)
        yield from stream.members(call.schema, ")")
        reading.finish(call, stream.clean and not stream.ended)
        count += 1


PYTHONIC = ToolFormat(
    "pythonic",
    (Opener("<|tool_call_start|>", _block("<|tool_call_start|>", "<|tool_call_end|>")),),
    ("<|tool_call_end|>",),
)
LLAMA_PYTHON = ToolFormat("llama_python", (Opener("<|python_tag|>", _block("<|python_tag|>", "")),))
