"""What every tool-call format is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.messages import Tool
from start_llm.parsing.calls import Calls, Parse
from start_llm.parsing.source import Step


def section(begin: str, end: str, call: str, parse: Parse) -> Parse:
    """Reads calls of which each begins with `call` and all stand between `begin` and `end`.

    Args:
        parse: reads one call, from behind `call`.
    """

    def block(calls: Calls) -> Step[None]:
        source = calls.source
        count = 0
        while True:
            yield from source.skip()
            opened = yield from source.accept((call, begin))
            if opened == begin:
                continue
            if count and not opened:
                break
            yield from parse(calls)
            count += 1
        yield from source.accept((end,))

    return block


@dataclass(frozen=True)
class Opener:
    """Text that may begin a block of calls.

    Attributes:
        text: the literal.
        parse: reads the block. Starts after `text`, or on it if `keep`. Raises NotACall
            if it is none; what was read since the last `settled` is then text.
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

    Attributes:
        openers: see Opener.
        closers: markup that is dropped where it stands alone after a call.
        per_tool: further openers that contain the tool's name.
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
