"""DeepSeek: calls as ``name<｜tool▁sep｜>{...}``; before V3.1 as ``function<｜tool▁sep｜>name`` and a fence."""

from __future__ import annotations

from start_llm.parsing.calls import MAX_NAME, NAME, Calls, NotACall
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step
from start_llm.parsing.tools.base import Opener, ToolFormat, section

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
_MAX_FENCE = 20
_JSON = Dialect(enders=(_END, _SECTION_END, _CALL, *LEAKED))


def _call(calls: Calls) -> Step[None]:
    source = calls.source
    yield from source.skip()
    name = yield from source.span(NAME, MAX_NAME)
    yield from source.skip()
    if not name or not (yield from source.accept((_SEPARATOR,))):
        raise NotACall
    yield from source.skip()
    if (yield from source.ahead()) not in ("{", "`"):  # what stood in front was the kind of tool
        name = yield from source.span(NAME, MAX_NAME)
        yield from source.skip()
        if not name:
            raise NotACall
    fenced = bool((yield from source.accept((_FENCE,))))
    if fenced:
        yield from source.until(("\n",), _MAX_FENCE)
    call = calls.begin(name)
    complete = yield from calls.json_arguments(call, _JSON)
    yield from source.skip()
    if fenced:
        yield from source.accept((_FENCE,))
        yield from source.skip()
    yield from source.accept((_END,))
    calls.finish(call, complete)


_BLOCK = section(_SECTION, _SECTION_END, _CALL, _call)
DEEPSEEK = ToolFormat(
    "deepseek", (Opener(_SECTION, _BLOCK), Opener(_CALL, _BLOCK, keep=True)), (_SECTION_END, _END, _SEPARATOR)
)
