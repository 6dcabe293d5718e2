"""One answer, read character by character: what is reasoning, what is text, what is a call.

`AnswerReader` is a coroutine over a `Source`. It sees characters, never chunks, so a streamed answer and the same
answer at once come out alike. What is decided here:

- **Reasoning** stands between the model's own tags, or at the very beginning between ``<think>``, ``<thinking>`` or
  ``<reasoning>`` tags, which models without tags of their own write. Line breaks right behind an opening tag and around
  a closing one belong to the tags.
- An **orphan** closing tag (nothing opened it, the prompt neither): while the text before is held back, that text is
  reasoning. Else it has been sent: the tag is dropped and both sides stay text. See `orphans`.
- **Calls** count outside of Markdown code only. One inside reasoning counts (the model forgot to close the block) if it
  begins a line and names a known tool.
- **Behind a call** there is no more text: a model that goes on mostly makes up what the tool will say. Further calls
  count, until the model writes a tool's result itself.
- **Turn tokens** are left out; where one begins somebody else's turn, the answer is over.
- **Stop strings** end visible text only: not reasoning, not a call, and nothing behind a call.
- Tags and turn tokens that stand apart in a sentence ("the <think> tag") are talked about, and text.
"""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.messages import Tool
from start_llm.parsing.blocks import Blocks
from start_llm.parsing.calls import CallLog, NewId
from start_llm.parsing.channels import Channel
from start_llm.parsing.code import CodeTracker
from start_llm.parsing.markup import RESULTS, Markup
from start_llm.parsing.orphans import OrphanHabit
from start_llm.parsing.outbox import Outbox
from start_llm.parsing.source import Source, Step
from start_llm.parsing.tools import harmony
from start_llm.parsing.tools.base import NAME, Opener
from start_llm.parsing.turntokens import LEAKED, STARTS, other_turn

_BEFORE_MENTION = " \t\"'`("
_AFTER_MENTION = " \t\"'`).,;:!?"


class AnswerReader:
    """Reads `source` and writes to `outbox`. One per choice; one thread.

    Attributes:
        stopped: the stop string that was met.
        over: nothing comes any more, though more text may.
        reasoning: what is read now is reasoning.
        behind_call: a call has begun, so text is no longer passed on.
        hidden: some text was not passed on.
    """

    def __init__(
        self,
        source: Source,
        outbox: Outbox,
        markup: Markup,
        tools: Sequence[Tool],
        habit: OrphanHabit,
        *,
        in_reasoning: bool,
        choice: int,
        new_id: NewId,
    ) -> None:
        self.stopped: str | None = None
        self.over = False
        self.reasoning = in_reasoning
        self.behind_call = False
        self.hidden = False
        self.content = Channel(outbox.text, gap=" \t\r\n")
        self.thinking = Channel(outbox.reasoning, gap="\r\n")
        self.calls = CallLog(tools, emit=outbox.emit, begun=self._call_begins, new_id=new_id, choice=choice)
        self.blocks = Blocks(source, self.calls)
        self._source, self._outbox, self._markup, self._habit = source, outbox, markup, habit
        self._closer = markup.own
        self._code = CodeTracker()
        self._thought_code = CodeTracker()

    def run(self) -> Step[None]:
        """The coroutine; ends with the text or with `over`."""
        if self.reasoning:
            yield from self._open_block(self._markup.own_start)
        while not self.over:
            scanner = self._markup.thought if self.reasoning else self._markup.text
            text, literal = yield from scanner.step(self._source)
            if not text and not literal:
                return
            self._say(text)
            if literal and self.reasoning:
                yield from self._in_thought(literal)
            elif literal:
                yield from self._in_text(literal)

    # --- text ---------------------------------------------------------------

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.reasoning:
            self._thought_code.add(text)
            self.thinking.add(text)
            return
        self._code.add(text)
        if not self.behind_call:
            self.content.add(text)
        elif not text.isspace():
            self.hidden = True

    def _give_back(self, literal: str) -> None:
        """What looked like markup is text. Only its first character is sure to be: the rest is scanned again."""
        if literal in self._markup.stops and not self.reasoning and not self.behind_call:
            self._stop(literal)
            return
        self._source.pos -= len(literal) - 1
        self._say(literal[0])

    def _stop(self, literal: str) -> None:
        self.content.flush()
        self.stopped, self.over = literal, True

    def _mentioned(self, literal: str) -> Step[bool]:
        """The markup just read stands apart from the text around it, in the middle of its line."""
        channel = self.thinking if self.reasoning else self.content
        if self.behind_call or channel.line_start or channel.last not in _BEFORE_MENTION:
            return False
        self._source.pos -= len(literal)  # not given up yet: what is consumed may be gone when more text comes
        after = yield from self._source.ahead(len(literal))
        self._source.pos += len(literal)
        return bool(after) and after in _AFTER_MENTION

    # --- literals -----------------------------------------------------------

    def _in_text(self, literal: str) -> Step[None]:
        markup = self._markup
        opener = markup.openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif literal in markup.stops and literal not in markup.tags and not self.behind_call:
            self._stop(literal)
        elif literal in markup.channel:
            yield from self._channel(literal)
        elif self._code.inside or (literal not in markup.drop and (yield from self._mentioned(literal))):
            self._give_back(literal)
        elif literal in LEAKED:
            yield from self._turn_token(literal)
        elif literal in markup.blocks and self._may_think(literal):
            yield from self._open_block(literal)
        elif literal == markup.own:
            yield from self._orphan()
        else:
            self._left_over(literal)

    def _left_over(self, literal: str) -> None:
        """Markup that opens nothing here: dropped, the end of the turn, or text."""
        if literal in self._markup.drop or (self.behind_call and literal in self._markup.closers):
            return
        if self.behind_call and literal in RESULTS:
            self.over = True
        else:
            self._give_back(literal)

    def _in_thought(self, literal: str) -> Step[None]:
        markup = self._markup
        opener = markup.openers.get(literal)
        if opener:
            yield from self._call(opener)
        elif literal in markup.channel:
            yield from self._channel(literal)
        elif literal == self._closer:
            self.thinking.drop_gap()
            self.reasoning = False
            yield from self._source.skip("\n")
        elif literal in LEAKED and not (yield from self._mentioned(literal)):
            yield from self._turn_token(literal)
        elif literal not in markup.drop:
            self._give_back(literal)

    def _turn_token(self, literal: str) -> Step[None]:
        (self.thinking if self.reasoning else self.content).leak()
        if literal in STARTS and (yield from other_turn(self._source, literal)):
            self.over = True

    # --- reasoning ----------------------------------------------------------

    def _may_think(self, start: str) -> bool:
        """The model's own tag opens a block anywhere, one of other models only where nothing was said before."""
        return start == self._markup.own_start or not (self.content.started or self.behind_call)

    def _open_block(self, start: str) -> Step[None]:
        """Behind an opening tag; a second one right behind it is dropped."""
        self._outbox.release()
        if not self.content.started:
            self.content.drop_gap()
        self.reasoning = True
        self._closer = self._markup.blocks.get(start, self._markup.own)
        self._thought_code = CodeTracker()
        yield from self._source.skip("\n")
        if start and (yield from self._source.accept((start,))):
            yield from self._source.skip("\n")
        self.thinking.begin()

    def _orphan(self) -> Step[None]:
        """A closing tag of a block that was never opened. What stands behind it begins anew."""
        if not self.behind_call:
            self._habit.seen()
        if self._outbox.holding:
            thought = self._outbox.withdraw()
            self.content.clear()
            self.thinking.begin()
            self.thinking.add(thought.lstrip("\n"))
            self.thinking.drop_gap()
        self._code = CodeTracker()
        yield from self._source.skip("\n")

    # --- calls --------------------------------------------------------------

    def _call_begins(self) -> None:
        """A call's first event is next: what stood between the text and it goes."""
        self.blocks.begun()
        self._outbox.release()
        self.thinking.drop_gap()
        self.content.drop_gap()
        self.reasoning = False
        self.behind_call = True

    def _may_open(self, opener: Opener) -> bool:
        if self.reasoning:
            return self.thinking.line_start and not self._thought_code.inside and not opener.first
        if self._code.inside or (opener.line_start and not self._code.line_start):
            return False
        if opener.first and (self.content.started or self.behind_call):
            return False
        first_is_name = opener.keep and NAME.match(opener.text)
        return not (first_is_name and NAME.match(self.content.last or " "))

    def _call(self, opener: Opener) -> Step[None]:
        source, length = self._source, len(opener.text)
        if not self._may_open(opener):
            self._give_back(opener.text)
            return
        source.pos -= length
        known_only, self.calls.in_reasoning = opener.known_only or self.reasoning, self.reasoning
        if (yield from self.blocks.read(opener.parse, skip=0 if opener.keep else length, known_only=known_only)):
            return
        source.pos += length
        self._give_back(opener.text)

    def _channel(self, literal: str) -> Step[None]:
        """Harmony: a message's head says what it is; its end leads to the next head."""
        self.thinking.drop_gap()
        self.reasoning = False
        if literal in harmony.ENDS:
            return
        self.blocks.inside = True
        head = yield from harmony.header(self._source, literal)
        self.blocks.inside = False
        if head is None:
            return
        if head.other:
            self.over = True
        elif head.recipient and self._markup.openers:
            self.calls.in_reasoning = False
            yield from self.blocks.read(harmony.call_to(head.recipient))
        elif head.channel == "analysis":
            self.reasoning = True
            self.thinking.begin()
