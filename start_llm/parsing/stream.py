"""From generated text to events: reasoning, visible text, tool calls, stop strings.

`OutputParser` is one coroutine over a `Source`: it sees characters, never chunks, so a
streamed answer and the same answer at once come out alike.

What is decided here:
- An orphan ``</think>`` (no opening tag, and the prompt did not open one) is dropped and
  both sides stay content, since what was sent cannot be taken back. Where a template opens
  the block, the caller says so with `in_reasoning`.
- Line breaks right after an opening tag, and around a closing one, belong to the tags.
- White space before a call is dropped; after a call it stays only between two texts.
- Leaked turn tokens are dropped around calls and at both ends of the text.
- Markup in Markdown code is text. A call inside reasoning counts (the model forgot to close
  the block) if it begins a line and names a known tool.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.core.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from start_llm.core.messages import Tool, ToolCall
from start_llm.parsing.calls import CallLog, NotACall
from start_llm.parsing.channels import Channel
from start_llm.parsing.code import CodeTracker
from start_llm.parsing.registry import OutputStyle
from start_llm.parsing.scan import Scanner
from start_llm.parsing.source import Source, Step
from start_llm.parsing.tools import harmony
from start_llm.parsing.tools.base import LEAKED, NAME, Opener, Parse, Reading


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
        choice: int = 0,
        new_id: Callable[[], str] = call_id,
    ) -> None:
        self.stopped: str | None = None
        self._style = style.reasoning
        self._choice = choice
        self._events: list[Event] = []
        self._source = Source()
        self._content = Channel(self._emit_text, gap=" \t\r\n")
        self._thinking = Channel(self._emit_reasoning, gap="\r\n")
        self._code = CodeTracker()
        self._reasoning_now = in_reasoning and bool(self._style.end)
        self._after_call = False
        self._calls = CallLog(tools, emit=self._emit, begun=self._call_begins, new_id=new_id, choice=choice)
        self._stops = frozenset(stop) - {""}
        active = bool(tools) and tool_calls
        self._openers = {opener.text: opener for opener in style.openers(tools)} if active else {}
        self._closers = style.closers if active else frozenset()
        self._tags = {self._style.start, self._style.end, *self._style.drop} - {""}
        if self._style.channels:
            self._tags |= {*harmony.HEADS, *harmony.ENDS}
        self._active = active
        self._mark: int | None = None
        self._settled = False
        self._in_block = False
        self._text_scanner = Scanner({*self._stops, *self._tags, *LEAKED, *self._openers, *self._closers})
        in_thought = {text for text, opener in self._openers.items() if not (opener.keep or opener.first)}
        self._thought_scanner = Scanner({*self._tags, *LEAKED, *in_thought})
        self._run = self._main()
        self._over = False
        self._resume()

    # --- the public side ----------------------------------------------------

    def feed(self, text: str) -> list[Event]:
        """The next piece of text. After a stop string nothing comes any more."""
        if self._over or not text:
            return []
        self._source.push(text)
        self._resume()
        return self._drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """No more text comes. What was held back comes out.

        Args:
            cut: the model was interrupted (by a limit). A call it was writing then stays as it is, and markup that has
                not become a call is dropped. Otherwise the model ended too early: such calls are mended or become text.
        """
        if not self._over and cut and self._in_block:
            self._over = True
            if self._calls.open is not None:
                self._calls.open.cut()
        elif not self._over:
            if cut:
                self._drop_half_a_marker()
            self._source.close()
            self._resume()
        if self.stopped is None:
            self._thinking.end()
            if self._after_call:
                self._content.drop_gap()
            self._content.end()
        return self._drain()

    def _drop_half_a_marker(self) -> None:
        held = self._source.peek(self._source.left)
        markers = (*self._openers, *self._closers, *self._tags)
        if len(held) > 2 and held[0] in "<[" and any(marker.startswith(held) for marker in markers):
            self._source.take(len(held))

    @property
    def in_reasoning(self) -> bool:
        """Whether the text now being generated is reasoning."""
        return self._reasoning_now

    def parsed(self) -> Parsed:
        """Everything so far; O(length of the answer)."""
        return Parsed(self._content.text, self._thinking.text or None, tuple(self._calls.finished))

    # --- events -------------------------------------------------------------

    def _resume(self) -> None:
        try:
            next(self._run)
        except StopIteration:
            self._over = True

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == event.index:
            self._events[-1] = replace(last, arguments=last.arguments + event.arguments)
        else:
            self._events.append(event)

    def _emit_text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = replace(last, text=last.text + text)
        else:
            self._events.append(TextDelta(text, self._choice))

    def _emit_reasoning(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = replace(last, text=last.text + text)
        else:
            self._events.append(ReasoningDelta(text, self._choice))

    def _call_begins(self) -> None:
        """A call's first event is next: what stood between the text and it goes, and nothing is given back."""
        if self._mark is not None:
            self._source.unmark(self._mark)
        self._mark = None
        self._settled = True
        self._thinking.drop_gap()
        self._content.drop_gap()
        self._reasoning_now = False
        self._after_call = True

    # --- the coroutine ------------------------------------------------------

    def _main(self) -> Step[None]:
        if self._reasoning_now:
            yield from self._open_block()
        while self.stopped is None:
            scanner = self._thought_scanner if self._reasoning_now else self._text_scanner
            text, literal = yield from scanner.step(self._source)
            if not text and not literal:
                return
            if self._reasoning_now:
                self._thinking.add(text)
                if literal:
                    yield from self._in_thought(literal)
            else:
                self._visible(text)
                if literal:
                    yield from self._in_text(literal)

    def _visible(self, text: str) -> None:
        if text:
            self._code.add(text)
            self._content.add(text, glue=self._after_call)
            if not text.isspace():
                self._after_call = False

    def _in_text(self, literal: str) -> Step[None]:
        opener = self._openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif literal in self._stops and literal not in self._tags:
            self._stop(literal)
        elif self._style.channels and literal in self._tags:
            yield from self._channel(literal)
        elif self._code.inside:
            self._give_back(literal)
        elif literal in LEAKED:
            yield from self._leak(self._content, literal)
            yield from self._blank_after_call()
        elif literal == self._style.start:
            self._reasoning_now = True
            yield from self._open_block()
        elif literal == self._style.end:
            yield from self._source.skip("\n")
        elif literal in self._style.drop:
            pass
        elif self._after_call:
            yield from self._blank_after_call()
        else:
            self._give_back(literal)

    def _in_thought(self, literal: str) -> Step[None]:
        opener = self._openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif self._style.channels and literal in self._tags:
            yield from self._channel(literal)
        elif literal == self._style.end:
            self._thinking.drop_gap()
            self._reasoning_now = False
            yield from self._source.skip("\n")
        elif literal in LEAKED:
            yield from self._leak(self._thinking, literal)
        elif literal not in self._style.drop:
            self._give_back(literal)

    def _open_block(self) -> Step[None]:
        """After an opening tag; a second one right behind it is dropped."""
        yield from self._source.skip("\n")
        if (yield from self._source.accept((self._style.start,))):
            yield from self._source.skip("\n")
        self._thinking.begin()

    def _blank_after_call(self) -> Step[None]:
        if self._after_call:
            self._visible((yield from self._source.skip()))

    def _leak(self, channel: Channel, literal: str) -> Step[None]:
        role = (yield from self._source.accept(("assistant\n",))) if literal == "<|im_start|>" else ""
        channel.leak(literal + role)

    def _stop(self, literal: str) -> None:
        self._content.flush()
        self.stopped = literal

    def _give_back(self, literal: str) -> None:
        """What looked like markup is text. Only its first character is sure to be: the rest is scanned again."""
        if literal in self._stops and not self._reasoning_now:
            self._stop(literal)
            return
        self._source.pos -= len(literal) - 1
        if self._reasoning_now:
            self._thinking.add(literal[0])
        else:
            self._visible(literal[0])

    # --- calls --------------------------------------------------------------

    def _may_open(self, opener: Opener) -> bool:
        if self._reasoning_now:
            return self._thinking.line_start and not opener.first
        if self._code.inside or (opener.line_start and not self._code.line_start):
            return False
        if opener.first and self._content.started:
            return False
        first_is_name = opener.keep and NAME.match(opener.text)
        return not (first_is_name and NAME.match(self._content.last or " "))

    def _call(self, opener: Opener) -> Step[None]:
        source = self._source
        if not self._may_open(opener):
            self._give_back(opener.text)
            return
        source.pos -= len(opener.text)
        self._calls.known_only = opener.known_only or self._reasoning_now
        if not (yield from self._parse(opener.parse, skip=0 if opener.keep else len(opener.text))):
            source.pos += len(opener.text)
            self._give_back(opener.text)

    def _parse(self, parse: Parse, skip: int = 0) -> Step[bool]:
        """Read a block of calls. False, and nothing consumed, if it is none."""
        source = self._source
        self._mark = source.mark()
        self._settled = False
        self._in_block = True
        self._calls.open = None
        source.pos += skip
        try:
            yield from parse(Reading(source, self._calls, self._settle))
        except NotACall:
            self._in_block = False
            if self._mark is not None:
                source.rewind(self._mark)
            if not self._settled:
                return False
        else:
            self._in_block = False
            if self._mark is not None:
                source.unmark(self._mark)
        yield from self._blank_after_call()
        return True

    def _channel(self, literal: str) -> Step[None]:
        """Harmony: a message's head says what it is; its end leads to the next head."""
        self._thinking.drop_gap()
        self._reasoning_now = False
        if literal in harmony.ENDS:
            return
        self._in_block = True
        self._calls.open = None
        head = yield from harmony.header(self._source, literal)
        self._in_block = False
        if head is None:
            return
        if head.recipient and self._active:
            self._calls.known_only = False
            yield from self._parse(harmony.call_to(head.recipient))
        elif head.channel == "analysis":
            self._reasoning_now = True
            self._thinking.begin()

    def _settle(self) -> None:
        """A call is done: what failed after it is given back from here on."""
        if self._mark is not None:
            self._source.unmark(self._mark)
        self._mark = self._source.mark()
        self._settled = True
