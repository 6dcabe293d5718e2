"""The literals that mean something in one request's answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from start_llm.core.messages import Tool
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.parsing.registry import OutputStyle
from start_llm.parsing.scan import Scanner
from start_llm.parsing.tools import harmony
from start_llm.parsing.tools.base import Opener
from start_llm.parsing.turntokens import LEAKED

RESULTS = ("<tool_response>",)
"""What opens a tool's result in a prompt: behind a call the model plays the tool."""


class Markup:
    """Immutable; made once per choice.

    Attributes:
        openers: what may begin a call, by its text; empty where nothing is taken for a call.
        closers: markup that is dropped where it stands alone behind a call.
        blocks: opening tags of reasoning and what closes each.
        own: the model's own closing tag, ``""`` if it has none.
        drop: structural markup that is never shown.
        channel: harmony's markup; empty for other models.
        stops: the client's stop strings.
        text, thought: scanners for visible text and for reasoning.
    """

    def __init__(self, style: OutputStyle, tools: Sequence[Tool], stop: Collection[str]) -> None:
        reasoning = style.reasoning
        self.openers: dict[str, Opener] = {opener.text: opener for opener in style.openers(tools)} if tools else {}
        self.closers = style.closers if tools else frozenset[str]()
        self.own = reasoning.end
        self.blocks: dict[str, str] = {}
        if reasoning.start:
            spoken = {other.start: other.end for other in REASONING_STYLES.values() if other.spoken}
            self.blocks = {**spoken, reasoning.start: reasoning.end}
        self.own_start = reasoning.start
        self.drop = frozenset(reasoning.drop)
        self.channel = frozenset((*harmony.HEADS, *harmony.ENDS)) if reasoning.channels else frozenset[str]()
        self.stops = frozenset(stop) - {""}
        ends = {*self.blocks.values(), self.own} - {""}
        self.tags = frozenset({*self.blocks, *ends, *self.drop, *self.channel})
        results = RESULTS if tools else ()
        self.text = Scanner({*self.stops, *self.tags, *LEAKED, *self.openers, *self.closers, *results})
        in_thought = {text for text, opener in self.openers.items() if not (opener.keep or opener.first)}
        self.thought = Scanner({*ends, *self.drop, *self.channel, *LEAKED, *in_thought})

    def half(self, text: str) -> bool:
        """Whether `text` is the beginning of some markup, and so long that it hardly is anything else."""
        markers = (*self.openers, *self.closers, *self.tags)
        return len(text) > 2 and text[0] in "<[" and any(marker.startswith(text) for marker in markers)
