"""Formats that are read by a parser from elsewhere: the block is held until its end, then parsed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from start_llm.core.messages import Tool
from start_llm.parsing.calls import Calls, NotACall, Parse, as_object
from start_llm.parsing.scan import LiteralScanner
from start_llm.parsing.schema import dump
from start_llm.parsing.source import Step
from start_llm.parsing.tools.base import ExternalFormat, Opener, ToolFormat


def external_format(ident: str, external: ExternalFormat, tools: Sequence[Tool]) -> ToolFormat:
    """The format with the request's tools bound to it, since such a parser wants to see them."""
    closers = (external.end,) if external.end else ()
    return ToolFormat(ident, (Opener(external.start, _parse(external, tools)),), closers)


def _parse(external: ExternalFormat, tools: Sequence[Tool]) -> Parse:
    definitions = [tool.as_function() for tool in tools]
    scanner = LiteralScanner((external.end,))

    def parse(calls: Calls) -> Step[None]:
        held: list[str] = []
        while True:
            text, end = yield from scanner.step(calls.source)
            held.append(text)
            if end or not text:
                break
        for found in _calls(external, "".join(held), definitions):
            ident = found.get("id")
            call = calls.begin(str(found.get("name") or ""), ident if isinstance(ident, str) else None)
            arguments = found.get("arguments")
            call.write(as_object(dump({} if arguments is None else arguments), call.schema))
            call.finish(True)
        calls.settle()

    return parse


def _calls(external: ExternalFormat, text: str, definitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        found = external.parse(text, definitions)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError, RecursionError) as error:
        raise NotACall from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
        raise NotACall
    return calls
