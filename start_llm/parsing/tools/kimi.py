"""Kimi K2: a section of ``functions.name:0`` heads, each with a JSON object."""

from __future__ import annotations

import re

from start_llm.parsing.calls import MAX_NAME, NAME, Calls, NotACall
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step
from start_llm.parsing.tools.base import Opener, ToolFormat, section

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")
_JSON = Dialect(enders=(_END, _SECTION_END, _CALL, *LEAKED))


def _call(calls: Calls) -> Step[None]:
    source = calls.source
    yield from source.skip()
    head = yield from source.span(NAME, MAX_NAME)
    yield from source.skip()
    match = _HEAD.fullmatch(head)
    if match is None or not (yield from source.accept((_ARGUMENTS,))):
        raise NotACall
    call = calls.begin(match[1], head if match[2] else None)
    complete = yield from calls.json_arguments(call, _JSON)
    yield from source.skip()
    yield from source.accept((_END,))
    calls.finish(call, complete)


_BLOCK = section(_SECTION, _SECTION_END, _CALL, _call)
KIMI_K2 = ToolFormat(
    "kimi_k2", (Opener(_SECTION, _BLOCK), Opener(_CALL, _BLOCK, keep=True)), (_SECTION_END, _END, _ARGUMENTS)
)
