"""What every tool-call format is made of, and formats whose parser comes from elsewhere (`ExternalFormat`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.messages import Tool
from start_llm.parsing.calls import Calls, NotACall, Parse, as_object
from start_llm.parsing.schema import dump
from start_llm.parsing.source import LiteralScanner, Step


@dataclass(frozen=True)
class Opener:
    """Text that may begin a block of calls.

    Attributes:
        parse: reads the block, from behind `text`, or from its beginning if `keep`.
        known_only: only calls of known tools count, since nothing else marks this as one.
        line_start: only at the start of a line.
        first: only where nothing visible was said before.
    """

    text: str
    parse: Parse
    keep: bool = False
    known_only: bool = False
    line_start: bool = False
    first: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls.

    `closers` are markup that is dropped where it stands alone after a call; `per_tool` gives further openers that
    contain the tool's name.
    """

    id: str
    openers: tuple[Opener, ...] = ()
    closers: tuple[str, ...] = ()
    per_tool: Callable[[Tool], Sequence[Opener]] | None = None


@dataclass(frozen=True)
class ExternalFormat:
    """A parser from elsewhere (mlx-lm's ``tool_parsers``), for formats that have no reader of ours.

    Attributes:
        start, end: the block's markers; `end` may be ``""``: the block then runs to the end of the text.
        parse: (text between the markers, OpenAI tool definitions) -> ``{"name", "arguments"}`` or a list of
            them; raises anything where the text is no call.
    """

    start: str
    end: str
    parse: Callable[[str, Any], dict[str, Any] | list[dict[str, Any]]] = field(compare=False)

    def for_tools(self, ident: str, tools: Sequence[Tool]) -> ToolFormat:
        """The format for a request's tools, which the parser wants to see. A block is parsed when its end is there."""
        definitions = [tool.as_function() for tool in tools]
        scanner = LiteralScanner((self.end,))

        def parse(calls: Calls) -> Step[None]:
            held: list[str] = []
            while True:
                text, end = yield from scanner.step(calls.source)
                held.append(text)
                if end or not text:
                    break
            for found in self._calls("".join(held), definitions):
                ident = found.get("id")
                call = calls.begin(str(found.get("name") or ""), ident if isinstance(ident, str) else None)
                arguments = found.get("arguments")
                call.write(as_object(dump({} if arguments is None else arguments), call.schema))
                call.finish(True)

        return ToolFormat(ident, (Opener(self.start, parse),), (self.end,) if self.end else ())

    def _calls(self, text: str, definitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            found = self.parse(text, definitions)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError, RecursionError) as error:
            raise NotACall from error
        listed = found if isinstance(found, list) else [found]
        if not listed or not all(isinstance(call, dict) and call.get("name") for call in listed):
            raise NotACall
        return listed
