"""Gemma: ``call:name{key:<|"|>text<|"|>,other:1}``, with ``<escape>`` as the quote in the older form."""

from __future__ import annotations

from start_llm.parsing.calls import MAX_NAME, NAME, Calls, NotACall, Parse
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Step
from start_llm.parsing.tools.base import Opener, ToolFormat


def _block(start: str, end: str, quote: str) -> Parse:
    dialect = Dialect(quotes=(quote, '"'), enders=(end, *LEAKED), restart=(f"{start}call:",))

    def parse(calls: Calls) -> Step[None]:
        source = calls.source
        count = 0
        while True:
            yield from source.skip(" \t\r\n,")
            yield from source.accept((start,))
            if not (yield from source.accept(("call:",))):
                break
            name = yield from source.span(NAME, MAX_NAME)
            yield from source.skip()
            if (yield from source.ahead()) != "{":
                raise NotACall
            call = calls.begin(name)
            complete = yield from calls.json_arguments(call, dialect)
            calls.finish(call, complete)
            count += 1
        if not count:
            raise NotACall
        yield from source.accept((end,))

    return parse


def _format(ident: str, start: str, end: str, quote: str) -> ToolFormat:
    return ToolFormat(ident, (Opener(start, _block(start, end, quote)),), (end,))


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
