"""Finds out in which format a model calls tools: one prompt asks for a call, and every parser reads the greedy answer.

The prompt is made and the answer is read by the code that serves requests. Knows no MLX: the
caller generates the tokens.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, Tool
from start_llm.models.background import in_background
from start_llm.parsing.choice import Detokenizer
from start_llm.parsing.registry import SHARED_SIGNS, TOOL_FORMATS, OutputStyle, output_style
from start_llm.parsing.stream import OutputParser
from start_llm.prompt.render import Renderer
from start_llm.prompt.traits import Traits

if TYPE_CHECKING:
    from start_llm.prompt.hf import HFTemplate, HFTokenizer

log = logging.getLogger(__name__)

TOKENS = 384
"""Of an answer at most: a call takes about 40, what a model thinks before it the rest."""
SECONDS = 20.0
"""Of an answer at most."""
_SAID = 400  # characters of the answer that are kept for people

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


class TooSlow(Exception):
    """Raised by a `Generate`: it would take too long here."""


Generate = Callable[[Sequence[int]], Iterator[int | None]]
"""Tokens of a prompt to tokens of a greedy answer without the end token; ``None`` where other models may have a turn.
Bounded; raises TooSlow, and whatever a model's own code may raise."""


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


def probe_tool_calls(
    template: HFTemplate,
    tokenizer: HFTokenizer,
    traits: Traits,
    expected: ExpectedStyle,
    detokenizer: Callable[[], Any],
    generate: Generate,
) -> Generator[float, None, ToolCallProbe]:
    """Asks and reads; pauses after each token. Prompt and answer are worked on in the background."""
    if not traits.tools:
        return ToolCallProbe("none", why="its template shows no tools")
    try:
        tokens, in_reasoning = yield from in_background(lambda: _prompt(template, tokenizer, traits))
    except BadRequest as error:
        return ToolCallProbe("none", why=error.message)
    began = time.monotonic()
    streaming = Detokenizer((yield from in_background(detokenizer)))
    pieces: list[str] = []
    slow = False
    try:
        for token in generate(tokens):
            if token is not None:
                pieces.append(streaming.feed(token))
            yield 0.0
    except TooSlow:
        slow = True
    except Exception as error:  # a model's own code may do anything; it is served all the same
        log.warning("a model could not be asked for a tool call", exc_info=True)
        return ToolCallProbe("open", why=f"asking it failed ({type(error).__name__}: {error})")
    text = "".join(pieces) + streaming.finish()
    count, seconds = len(pieces), round(time.monotonic() - began, 3)
    found = yield from in_background(lambda: read_call(text, expected, in_reasoning=in_reasoning))
    if found is not None:
        return ToolCallProbe("called", *found, text[:_SAID], tokens=count, seconds=seconds)
    outcome, why = ("open", "it takes too long here") if slow else ("silent", "")
    return ToolCallProbe(outcome, said=text[:_SAID], why=why, tokens=count, seconds=seconds)


def _prompt(template: HFTemplate, tokenizer: HFTokenizer, traits: Traits) -> tuple[list[int], bool]:
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
