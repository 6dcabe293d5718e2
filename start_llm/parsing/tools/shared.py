"""``<tool_call>`` blocks of every family, told apart by what stands in them, and calls without any markup around.

These are recognised whatever the model's family: Hermes JSON, Qwen's XML, GLM's keys and values, and GLM-4's
``<name>``/``<arguments>``.
"""

from __future__ import annotations

from start_llm.core.messages import Tool
from start_llm.parsing.calls import Calls, NotACall
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step
from start_llm.parsing.tools.base import Opener, ToolFormat
from start_llm.parsing.tools.hermes import JSON, bare_json, bare_list, bare_objects, json_block
from start_llm.parsing.tools.tagged import GLM, QWEN

OPEN, CLOSE = GLM.outer
_MAX_FENCE = 20


def tool_call_block(calls: Calls) -> Step[None]:
    """What follows ``<tool_call>``."""
    source = calls.source
    while True:
        if not (yield from source.after_space(OPEN, *LEAKED)):
            break
    fenced = bool((yield from source.accept(("```",))))
    if fenced:
        yield from source.until(("\n",), _MAX_FENCE)
        yield from source.skip()
    char = yield from source.ahead()
    if char and char in "{[":
        yield from json_block(calls)
    elif (yield from source.starts((QWEN.call[0],))):
        yield from QWEN.read_block(calls)
    elif (yield from source.accept(("<name>",))):
        yield from _named(calls)
    else:
        yield from GLM.read_keyed(calls)
    if fenced:
        yield from source.after_space("```")
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
        Opener("[{", bare_list, keep=True, known_only=True, line_start=True),
        Opener("[\n", bare_list, keep=True, known_only=True, line_start=True),
        Opener("```json\n", fenced_json, known_only=True, line_start=True, first=True),
        Opener("```\n", fenced_json, known_only=True, line_start=True, first=True),
    ),
    closers=(CLOSE, "</function>", "</parameter>", "</arg_value>", "</arguments>"),
    per_tool=keyed_openers,
)
