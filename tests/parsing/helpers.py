"""Running the parser in any chunking, and checking what every event stream must satisfy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count, pairwise
from unittest.mock import patch

from start_llm.core.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallFinished, ToolCallStarted
from start_llm.core.messages import Message, Tool
from start_llm.parsing.registry import OutputStyle, output_style
from start_llm.parsing.stream import OutputParser

READ = Tool(
    "read",
    "Read a file",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "limit": {"type": "integer"},
            "follow": {"type": "boolean"},
            "ratio": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["path"],
    },
)
BASH = Tool("bash", "Run", {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})
WRITE = Tool(
    "write",
    "Write",
    {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
)
NOW = Tool("now", "Time", {"type": "object", "properties": {}})
TOOLS = (READ, BASH, WRITE, NOW)


def style(tools: str = "hermes_json", reasoning: str = "think_tag") -> OutputStyle:
    return output_style(tool_parser=tools, reasoning_parser=reasoning)


def style_of(tools: str) -> OutputStyle:
    """Of a model that writes calls so."""
    return style(tools, tools if tools in ("harmony", "kimi_k3", "inkling") else "think_tag")


def run(
    text: str,
    cuts: Sequence[int] | int = (),
    *,
    form: OutputStyle | None = None,
    tools: Sequence[Tool] = TOOLS,
    stop: Sequence[str] = (),
    in_reasoning: bool = False,
    tool_calls: bool = True,
    whole: bool = False,
) -> tuple[list[Event], Message, str | None]:
    """Parse `text` cut at the offsets `cuts` (or every `cuts` characters)."""
    ids = count()
    with patch("start_llm.parsing.calls.call_ids", lambda: lambda: f"call_{next(ids)}"):
        parser = OutputParser(
            form or style(),
            tools=tools,
            stop=stop,
            in_reasoning=in_reasoning,
            tool_calls=tool_calls,
            whole=whole,
        )
    places = list(range(0, len(text), cuts)) if isinstance(cuts, int) else sorted({0, *cuts})
    events: list[Event] = []
    for start, end in pairwise([*places, len(text)]):
        events += parser.feed(text[start:end])
    events += parser.finish()
    check(events, parser.parsed())
    return events, parser.parsed(), parser.stopped


def check(events: Sequence[Event], parsed: Message) -> None:
    """The deltas add up to the whole, and every call's events come in order."""
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == parsed.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == (parsed.reasoning or "")
    started: list[ToolCallStarted] = []
    pieces: dict[int, str] = {}
    finished: list[ToolCallFinished] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            assert event.index == len(started) == len(finished), "calls do not interleave"
            started.append(event)
            pieces[event.index] = ""
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(started) - 1 == len(finished)
            pieces[event.index] += event.arguments
        elif isinstance(event, ToolCallFinished):
            assert (event.index, event.id, event.name) == (len(finished), started[-1].id, started[-1].name)
            assert event.arguments == pieces[event.index]
            assert isinstance(json.loads(event.arguments), dict)
            finished.append(event)
    assert len(started) == len(finished) == len(parsed.tool_calls)
    assert [(c.id, c.name, c.arguments) for c in parsed.tool_calls] == [(e.id, e.name, e.arguments) for e in finished]


def calls(parsed: Message) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
