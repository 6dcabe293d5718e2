"""From generated text to events. `OutputParser` is what the rest of the server uses; `reader` decides what is what."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.events import Event
from start_llm.core.messages import Tool, ToolCall
from start_llm.parsing.calls import NewId
from start_llm.parsing.markup import Markup
from start_llm.parsing.outbox import Outbox
from start_llm.parsing.reader import AnswerReader
from start_llm.parsing.registry import OutputStyle
from start_llm.parsing.source import Source


@dataclass(frozen=True)
class Parsed:
    """What was said so far. `reasoning` is ``None`` where there was none."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """One per choice; one thread.

    Args:
        style: how this model writes.
        tools: the request's tools; without any, nothing is taken for a call.
        stop: strings that end the visible text.
        in_reasoning: the prompt already opened the reasoning block.
        tool_calls: False: all markup of calls is text.
        whole: nobody reads the events before the end. Text is then held back while it may turn out to be reasoning
            whose block was never opened.
        new_id: makes ids for calls that bring none.
    """

    def __init__(
        self,
        style: OutputStyle,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        in_reasoning: bool = False,
        tool_calls: bool = True,
        whole: bool = False,
        choice: int = 0,
        new_id: NewId = call_id,
    ) -> None:
        in_reasoning = in_reasoning and bool(style.reasoning.end)
        self._orphans = style.orphans
        self._waits = self._orphans.likely and bool(style.reasoning.end) and not in_reasoning
        self._source = Source()
        self._outbox = Outbox(choice, holding=self._waits or (whole and not in_reasoning))
        self._markup = Markup(style, tools if tool_calls else (), stop)
        self._reader = AnswerReader(
            *(self._source, self._outbox, self._markup, tools, style.orphans),
            in_reasoning=in_reasoning,
            choice=choice,
            new_id=new_id,
        )
        self._run = self._reader.run()
        self._done = False
        self._resume()

    def feed(self, text: str) -> list[Event]:
        """The next piece of text. After a stop string, and in somebody else's turn, nothing comes any more."""
        if self._done or not text:
            return []
        self._source.push(text)
        self._resume()
        return self._outbox.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """No more text comes. What was held back comes out.

        Args:
            cut: the model was interrupted (by a limit). A call it was writing then stays as it is, and markup that has
                not become a call is dropped. Otherwise the model ended too early: such calls are mended or become text.
        """
        reader = self._reader
        if not self._done and cut and reader.blocks.inside:
            self._done = True
            reader.blocks.cut()
        elif not self._done:
            held = self._source.peek(self._source.left)
            if cut and self._markup.half(held):
                self._source.take(len(held))
            self._source.close()
            self._resume()
        if reader.stopped is None:
            reader.thinking.end()
            reader.content.end()
        if self._waits and self._outbox.holding:
            self._orphans.missed()
        self._outbox.release()
        return self._outbox.drain()

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._reader.stopped

    @property
    def ended(self) -> bool:
        """The answer is complete, whatever the model goes on to write."""
        return self._reader.over

    @property
    def faithful(self) -> bool:
        """What the model wrote is what the client was told: no text and no call was left out."""
        return not (self._reader.hidden or self._reader.calls.dropped)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text now being generated is reasoning."""
        return self._reader.reasoning

    def parsed(self) -> Parsed:
        """Everything so far; O(length of the answer)."""
        reader = self._reader
        return Parsed(reader.content.text, reader.thinking.text or None, tuple(reader.calls.finished))

    def _resume(self) -> None:
        try:
            next(self._run)
        except StopIteration:
            self._done = True
