"""From generated text to events. `OutputParser` is what the rest of the server uses; `reader` decides what is what."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.events import Event
from start_llm.core.messages import Tool, ToolCall
from start_llm.parsing.calls import NewId
from start_llm.parsing.reader import AnswerReader
from start_llm.parsing.registry import OutputStyle


@dataclass(frozen=True)
class Parsed:
    """What was said so far. `reasoning` is ``None`` where there was none."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser(AnswerReader):
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
        self._waits_for_end_tag = style.stray_ends.likely and bool(style.reasoning.end) and not in_reasoning
        super().__init__(
            *(style, tools, stop),
            in_reasoning=in_reasoning,
            tool_calls=tool_calls,
            holding=self._waits_for_end_tag or (whole and not in_reasoning),
            choice=choice,
            new_id=new_id,
        )
        self._steps = self._read()
        self._done = False
        self._resume()

    def feed(self, text: str) -> list[Event]:
        """The next piece of text. After a stop string, and in somebody else's turn, nothing comes any more."""
        if self._done or not text:
            return []
        self._source.push(text)
        self._resume()
        return self._buffer.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """No more text comes. What was held back comes out.

        Args:
            cut: the model was interrupted (by a limit). A call it was writing then stays as it is, and markup that has
                not become a call is dropped. Otherwise the model ended too early: such calls are mended or become text.
        """
        if not self._done and cut and self._calls.reading:
            self._done = True
            self._calls.cut()
        elif not self._done:
            held = self._source.peek(self._source.left)
            if cut and self._literals.half(held):
                self._source.take(len(held))
            self._source.close()
            self._resume()
        if self.stopped is None:
            self._thinking.end()
            self._content.end()
        if self._waits_for_end_tag and self._buffer.holding:
            self._stray_ends.missed()
        self._buffer.release()
        return self._buffer.drain()

    def parsed(self) -> Parsed:
        """Everything so far; O(length of the answer)."""
        return Parsed(self._content.text, self._thinking.text or None, tuple(self._calls.finished))

    def _resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._done = True
