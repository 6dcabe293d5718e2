"""How generated text becomes events: reasoning, text and tool calls of one answer (`OutputParser`).

A coroutine reads from a `Source` and waits where what follows is not there yet. It never sees how the text was cut, so
a streamed answer and the same answer at once come out alike. It looks for literals (`AnswerLiterals`): tags of
reasoning, openers of calls, turn tokens, stop strings. Text between them goes through a `TextChannel`, which leaves
out white space beside markup. The reader of a tool format (`tools/`) gives a call's arguments to `Calls` as they come.
All of them fill an `EventBuffer`, which `feed` empties. This file does not know how calls are written, nor tokens.

What counts as reasoning, as a call and as the end is told in docs/api.md, "How answers are read".
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial

from start_llm.core.events import Event
from start_llm.core.messages import Message, Tool
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.parsing.calls import NAME, Calls, Opener
from start_llm.parsing.output import CodeTracker, EventBuffer, TextChannel
from start_llm.parsing.registry import OutputStyle
from start_llm.parsing.source import LEAKED, STARTS, LiteralScanner, Source, Step, other_turn
from start_llm.parsing.tools.headed import HARMONY_ENDS, HARMONY_HEADS, harmony_call, harmony_header

_BEFORE_MENTION = " \t\"'`("
_AFTER_MENTION = " \t\"'`).,;:!?"
RESULTS = ("<tool_response>",)  # what opens a tool's result in a prompt: behind a call the model plays the tool


class AnswerLiterals:
    """The literals that mean something in one answer. Immutable; made once per choice.

    Attributes:
        openers: what may begin a call, by its text; empty where nothing is taken for a call.
        closers: markup that is dropped where it stands alone behind a call.
        reasoning: the model's own tags; `blocks` has all opening tags of reasoning, and what closes each.
        harmony: its markup; empty for other models.
        in_text, in_reasoning: scanners for visible text and for reasoning.
    """

    def __init__(self, style: OutputStyle, tools: Sequence[Tool], stop: Collection[str], *, raw: bool) -> None:
        reasoning = style.reasoning
        self.openers: dict[str, Opener] = {opener.text: opener for opener in style.openers(tools)} if tools else {}
        self.closers = style.closers if tools else frozenset[str]()
        self.reasoning = reasoning
        self.blocks: dict[str, str] = {}
        if reasoning.start:
            spoken = {other.start: other.end for other in REASONING_STYLES.values() if other.spoken}
            self.blocks = {**spoken, reasoning.start: reasoning.end}
        self.harmony = frozenset((*HARMONY_HEADS, *HARMONY_ENDS)) if reasoning.channels else frozenset[str]()
        self.stops = frozenset(stop) - {""}
        ends = {*self.blocks.values(), reasoning.end, *reasoning.also_ends} - {""}
        self.tags = frozenset({*self.blocks, *ends, *reasoning.drop, *self.harmony})
        others = (*(() if raw else LEAKED), *(RESULTS if tools else ()))
        self.in_text = LiteralScanner({*self.stops, *self.tags, *self.openers, *self.closers, *others})
        inside = {text for text, opener in self.openers.items() if not (opener.keep or opener.first)}
        self.in_reasoning = LiteralScanner({*ends, *reasoning.drop, *self.harmony, *LEAKED, *inside})


class OutputParser:
    """One per choice; one thread.

    Args:
        tools: the request's tools; without any, nothing is taken for a call.
        stop: strings that end the visible text.
        in_reasoning: the prompt already opened the reasoning block.
        tool_calls: False: all markup of calls is text.
        raw: the text stays as it was decoded (`/v1/completions`): only a stop string ends it. For a style without tags.
        whole: nobody reads the events before the end. Text is then held back while it may turn out to be reasoning
            whose block was never opened.

    Attributes:
        stopped: the stop string that ended the text.
        ended: the answer is complete, whatever the model goes on to write.
        in_reasoning: the text now being generated is reasoning.
    """

    def __init__(
        self,
        style: OutputStyle,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        in_reasoning: bool = False,
        tool_calls: bool = True,
        raw: bool = False,
        whole: bool = False,
        choice: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self.ended = False
        self.in_reasoning = in_reasoning and bool(style.reasoning.end)
        self._stray_ends = style.stray_ends
        self._waits_for_end = self._stray_ends.likely and bool(style.reasoning.end) and not self.in_reasoning
        self._source = Source()
        self._buffer = EventBuffer(choice, holding=self._waits_for_end or (whole and not self.in_reasoning))
        self._content = TextChannel(self._buffer.text, gap="" if raw else " \t\r\n")
        self._thinking = TextChannel(self._buffer.reasoning, gap="\r\n")
        me = weakref.proxy(self)  # its parts do not hold it: its memory is free with the request, not at a collection
        begins = partial(OutputParser._call_begins, me)
        self._calls = Calls(self._source, tools, self._buffer, on_call=begins)
        self._literals = AnswerLiterals(style, tools if tool_calls else (), stop, raw=raw)
        self._closer = self._literals.reasoning.end
        self._steps = OutputParser._read(me)
        self._done = next(self._steps, True) is True

    def feed(self, text: str) -> list[Event]:
        """The next piece of text. After a stop string, and in somebody else's turn, nothing comes any more."""
        if self._done or not text:
            return []
        self._source.push(text)
        self._done = next(self._steps, True) is True
        return self._buffer.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """No more text comes. What was held back comes out.

        `cut`: the model was interrupted (by a limit). A call it was writing then stays as it is, and markup that has
        not become a call is dropped. Otherwise the model ended too early: such calls are mended or become text.
        """
        if not self._done and cut and self._calls.reading:
            self._done = True
            self._calls.cut()
            self._steps.close()
        elif not self._done:
            held = self._source.peek(self._source.left)
            markup = (*self._literals.openers, *self._literals.closers, *self._literals.tags)
            # The beginning of some markup, and so long that it hardly is anything else.
            if cut and len(held) > 2 and set(held) & set("<[]") and any(text.startswith(held) for text in markup):
                self._source.take(len(held))
            self._source.closed = True
            self._done = next(self._steps, True) is True
        if self.stopped is None:
            self._thinking.end()
            self._content.end()
        if self._waits_for_end and self._buffer.holding:
            self._stray_ends.missed()
        self._buffer.release()
        return self._buffer.drain()

    @property
    def faithful(self) -> bool:
        """What the model wrote is what the client was told: no text and no call was left out."""
        return not (self._content.lost or self._calls.dropped)

    def parsed(self) -> Message:
        """Everything so far, as an assistant message; O(length of the answer)."""
        calls = tuple(self._calls.finished)
        return Message("assistant", self._content.text, self._thinking.text or None, calls)

    def _read(self) -> Step[None]:
        """The coroutine; ends with the text or with `over`."""
        if self.in_reasoning:
            yield from self._open_block(self._literals.reasoning.start)
        while not self.ended:
            scanner = self._literals.in_reasoning if self.in_reasoning else self._literals.in_text
            text, literal = yield from scanner.step(self._source)
            if not text and not literal:
                return
            self._channel.add(text)
            if literal and self.in_reasoning:
                yield from self._in_reasoning(literal)
            elif literal:
                yield from self._in_text(literal)

    @property
    def _channel(self) -> TextChannel:
        return self._thinking if self.in_reasoning else self._content

    def _give_back(self, literal: str) -> None:
        """What looked like markup is text, or a stop string. Only its first character is sure to be text: the rest is
        scanned again."""
        if literal in self._literals.stops and not self.in_reasoning and not self._content.muted:
            self._content.flush()
            self.stopped, self.ended = literal, True
        else:
            self._source.pos -= len(literal) - 1
            self._channel.add(literal[0])

    def _is_mention(self, literal: str) -> Step[bool]:
        """The markup just read stands apart from the text around it, in the middle of its line."""
        if self._content.muted or self._channel.code.line_start or self._channel.last not in _BEFORE_MENTION:
            return False
        self._source.pos -= len(literal)  # not given up yet: what is consumed may be gone when more text comes
        after = yield from self._source.ahead(len(literal))
        self._source.pos += len(literal)
        return bool(after) and after in _AFTER_MENTION

    def _in_text(self, literal: str) -> Step[None]:
        literals = self._literals
        opener = literals.openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif literal in literals.stops and literal not in literals.tags and not self._content.muted:
            self._give_back(literal)
        elif literal in literals.harmony:
            yield from self._harmony(literal)
        elif (yield from self._is_quoted(literal)):
            self._give_back(literal)
        else:
            yield from self._tag_in_text(literal)

    def _is_quoted(self, literal: str) -> Step[bool]:
        """Whether it is a word of the answer here: inside code, or mentioned in a sentence."""
        if self._content.code.inside:
            return True
        return literal not in self._literals.reasoning.drop and (yield from self._is_mention(literal))

    def _tag_in_text(self, literal: str) -> Step[None]:
        """A tag between words of the answer: it opens or ends something, or is left out."""
        literals = self._literals
        if literal in LEAKED:
            yield from self._turn_token(literal)
        elif literal == literals.reasoning.start or (literal in literals.blocks and not self._content.started):
            yield from self._open_block(literal)
        elif literal == literals.reasoning.end and literal not in literals.reasoning.drop:
            yield from self._stray_end()
        elif self._content.muted and literal in RESULTS:
            self.ended = True
        elif literal in literals.reasoning.drop:
            self._content.part()
        elif not (self._content.muted and literal in literals.closers):
            self._give_back(literal)

    def _in_reasoning(self, literal: str) -> Step[None]:
        literals = self._literals
        opener = literals.openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif literal in literals.harmony:
            yield from self._harmony(literal)
        elif literal == self._closer or literal in literals.reasoning.also_ends:
            self._thinking.drop_gap()
            self.in_reasoning = False
            yield from self._source.skip("\n")
        elif literal in LEAKED and not (yield from self._is_mention(literal)):
            yield from self._turn_token(literal)
        elif literal not in literals.reasoning.drop:
            self._give_back(literal)

    def _turn_token(self, literal: str) -> Step[None]:
        self._channel.leaked = True
        if literal in STARTS and (yield from other_turn(self._source, literal)):
            self.ended = True

    def _open_block(self, start: str) -> Step[None]:
        """Behind an opening tag; a second one right behind it is dropped."""
        self._buffer.release()
        if not self._content.started:
            self._content.drop_gap()
        self.in_reasoning = True
        self._closer = self._literals.blocks.get(start, self._literals.reasoning.end)
        yield from self._source.skip("\n")
        if start and (yield from self._source.accept((start,))):
            yield from self._source.skip("\n")
        self._thinking.begin()

    def _stray_end(self) -> Step[None]:
        """A closing tag of a block that was never opened. What stands behind it begins anew."""
        if self._content.muted:
            self._calls.reasoning_closed()
        else:
            self._stray_ends.seen()
        if self._buffer.holding:
            thought = self._buffer.withdraw()
            self._content.clear()
            self._thinking.begin()
            self._thinking.add(thought.lstrip("\n"))
            self._thinking.drop_gap()
        self._content.code = CodeTracker()
        yield from self._source.skip("\n")

    def _call_begins(self) -> None:
        """A call's first event is next: what stood between the text and it goes."""
        self._buffer.release()
        self._thinking.drop_gap()
        self._content.drop_gap()
        self.in_reasoning = False
        self._content.muted = True

    def _may_open(self, opener: Opener) -> bool:
        if self.in_reasoning:
            return self._thinking.code.line_start and not self._thinking.code.inside and not opener.first
        if self._content.code.inside or (opener.line_start and not self._content.code.line_start):
            return False
        if opener.first and self._content.started:
            return False
        first_is_name = opener.keep and NAME.match(opener.text)
        return not (first_is_name and NAME.match(self._content.last or " "))

    def _call(self, opener: Opener) -> Step[None]:
        length, is_call = len(opener.text), False
        if self._may_open(opener):
            self._source.pos -= length
            skip, known_only = 0 if opener.keep else length, opener.known_only or self.in_reasoning
            is_call = yield from self._calls.read_block(
                opener.parse, skip=skip, known_only=known_only, in_reasoning=self.in_reasoning
            )
            self._source.pos += 0 if is_call else length
        if not is_call:
            self._give_back(opener.text)

    def _harmony(self, literal: str) -> Step[None]:
        """Harmony: a message's head says what it is; its end leads to the next head."""
        self._thinking.drop_gap()
        self.in_reasoning = False
        if literal in HARMONY_ENDS:
            return
        self._calls.reading = True
        head = yield from harmony_header(self._source, literal)
        self._calls.reading = False
        if head is None:
            return
        if head.other:
            self.ended = True
        elif head.recipient and self._literals.openers:
            yield from self._calls.read_block(harmony_call(head.recipient))
        elif head.channel == "analysis":
            self.in_reasoning = True
            self._thinking.begin()
