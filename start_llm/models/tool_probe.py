"""In which format a model calls tools: a prompt that asks for a call, and what each parser reads in the answer.

The code that serves requests makes the prompt and reads the answer. Knows no MLX: `engine.probe` asks the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from start_llm.core.messages import Message, Tool
from start_llm.parsing.registry import SHARED_SIGNS, TOOL_FORMATS, OutputStyle, output_style
from start_llm.parsing.stream import OutputParser
from start_llm.prompt.render import Renderer
from start_llm.prompt.traits import Traits

if TYPE_CHECKING:
    from start_llm.prompt.hf import HFTemplate, HFTokenizer

TOKENS = 384
"""Of an answer at most: a call takes about 40, what a model thinks before it the rest."""
SECONDS = 20.0
"""Of an answer at most."""
SAID = 400  # characters of the answer that are kept for people

TOOL = Tool(
    "get_weather",
    "Tells the weather in a city, as it is now.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city's name."}},
        "required": ["city"],
    },
)
ASKED = Message("user", "What is the weather in Paris now? Use the tool get_weather to find out.")


@dataclass(frozen=True, slots=True)
class ToolCallProbe:
    """The result."""

    # called: a call was read; silent: there is none; none: no tools in the template; open: to be asked later
    outcome: str
    format: str | None = None  # id of the tool format; ``None`` where it does not show (every parser reads bare JSON)
    reasoning: str | None = None  # id of the reasoning style that goes with `format`, where that is another one
    said: str = ""  # the beginning of the answer
    why: str = ""  # for ``none`` and ``open``: the reason, as the end of a sentence
    tokens: int = 0
    seconds: float = 0.0

    def report(self, assumed: str) -> str:
        """For people. `assumed`: the tool format that is used where the probe found none."""
        took = f"{self.tokens} tokens, {self.seconds:.1f} s"
        if self.outcome == "called":
            return f"asked to call a tool, the model wrote {self.format or 'a call without any mark'} ({took})"
        if self.outcome == "silent":
            return f"asked to call a tool, the model wrote no call ({took}); its calls will be read as {assumed}"
        return f"the model was not asked to call a tool: {self.why}; its calls will be read as {assumed}"


@dataclass(frozen=True, slots=True)
class ExpectedStyle:
    """How the model is taken to write before it is asked: what `parsing.registry.output_style` takes."""

    formats: tuple[str, ...]  # ids of tool formats to try first; all others follow
    reasoning: str
    think_tags: tuple[str, str] | None = None


def question(template: HFTemplate, tokenizer: HFTokenizer, traits: Traits) -> tuple[list[int], bool]:
    """Its tokens, and whether the answer begins inside of a thought. Raises BadRequest."""
    renderer = Renderer(template, traits, preserve_thinking=True)
    rendered = renderer.render([ASKED], [TOOL], renderer.variables(thinking=False, effort=None, extra={}))
    return list(tokenizer.encode(rendered.text)), rendered.in_reasoning


def read_call(text: str, expected: ExpectedStyle, *, in_reasoning: bool) -> tuple[str | None, str | None] | None:
    """(tool format, reasoning style if it is another than expected) of the answer `text`; ``None`` if it holds no call.

    The format is ``None`` where the call has no mark of any.
    """
    called = False
    for ident in dict.fromkeys((*expected.formats, *TOOL_FORMATS)):
        if ident == "null":
            continue
        other = ident if ident == "harmony" != expected.reasoning else None  # it is a reasoning style, too
        style = output_style(
            tool_parser=ident,
            reasoning_parser=other or expected.reasoning,
            reasoning_tags=None if other else expected.think_tags,
        )
        if _calls(text, style, in_reasoning):
            called = True
            if _wrote(text, style, in_reasoning):
                return ident, other
    return (None, None) if called else None


def _wrote(text: str, style: OutputStyle, in_reasoning: bool) -> bool:
    """The call is in this very format, and not in one that is read beside it."""
    ident = style.tools.id
    if ident == "harmony":
        return "to=functions." in text or "to=" + TOOL.name in text
    sign = SHARED_SIGNS.get(ident)
    if sign is not None and sign.search(text):
        return True
    alone = OutputStyle(style.reasoning, style.tools, others=())
    return bool(style.tools.openers) and _calls(text, alone, in_reasoning)


def _calls(text: str, style: OutputStyle, in_reasoning: bool) -> bool:
    """Whether the answer calls the tool with what it needs."""
    parser = OutputParser(style, tools=[TOOL], in_reasoning=in_reasoning, whole=True)
    parser.feed(text)
    parser.finish()
    for call in parser.parsed().tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            continue
        if call.name == TOOL.name and isinstance(arguments, dict) and isinstance(arguments.get("city"), str):
            return True
    return False
