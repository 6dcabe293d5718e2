"""Text and calls on their way out: events that are neighbours become one, and white space beside markup is left out.

Also what is known of the text that went before: whether it ended inside Markdown code, or at the start of a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from start_llm.core.events import Event, ReasoningDelta, TextDelta, ToolCallDelta

_PIECES = re.compile(r"\n|`+|[^`\n]+")


class EventBuffer:
    """Collects the events of one choice; neighbours of one kind become one event. One thread.

    While it is `holding`, visible text is kept back until `release`, or taken out by `withdraw`.
    """

    def __init__(self, choice: int, *, holding: bool) -> None:
        self.holding = holding
        self.choice = choice
        self._events: list[Event] = []
        self._held: list[str] = []

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def emit(self, event: Event) -> None:
        match self._events[-1] if self._events else None, event:
            case (TextDelta() as last, TextDelta(text=text)) | (ReasoningDelta() as last, ReasoningDelta(text=text)):
                self._events[-1] = replace(last, text=last.text + text)
            case ToolCallDelta() as last, ToolCallDelta() if last.index == event.index:
                self._events[-1] = replace(last, arguments=last.arguments + event.arguments)
            case _:
                self._events.append(event)

    def text(self, text: str) -> None:
        if self.holding:
            self._held.append(text)
        else:
            self.emit(TextDelta(text, self.choice))

    def reasoning(self, text: str) -> None:
        self.emit(ReasoningDelta(text, self.choice))

    def release(self) -> None:
        """What was kept back is visible text; from now on text goes out at once."""
        text = self.withdraw()
        if text:
            self.text(text)

    def withdraw(self) -> str:
        """What was kept back, which does not go out; from now on text does."""
        self.holding = False
        text = "".join(self._held)
        self._held.clear()
        return text


class CodeTracker:
    """Whether text is Markdown code: in a fence (three or more backticks), or an inline span, which ends with its line.

    Markup that is quoted there is talked about, not meant. More forgiving than CommonMark, since a fence taken wrongly
    would hide every call after it: a fence may open after other text in its line, and may close at the end of a line of
    code. O(new text). Runs of backticks may be split between calls of `add`.
    `line_start`: nothing but white space stands before the next character in its line.
    """

    def __init__(self) -> None:
        self.line_start = True
        self._fence = self._inline = self._run = 0  # backticks
        self._run_at_start = self._closing = self._opened_here = False

    def add(self, text: str) -> None:
        for piece in _PIECES.findall(text):
            if piece[0] == "`":
                if not self._run:
                    self._run_at_start = self.line_start
                self._run += len(piece)
                self.line_start = False
                continue
            self._end_run()
            if piece == "\n":
                if self._closing:
                    self._fence = 0
                elif self._inline >= 3:
                    self._fence = self._inline
                self._closing = self._opened_here = False
                self._inline = 0
                self.line_start = True
            elif not piece.isspace():
                self.line_start = self._closing = False

    @property
    def inside(self) -> bool:
        """For the character that comes next, which is no backtick."""
        self._end_run()
        return bool(self._inline or (self._fence and not self._closing))

    def _end_run(self) -> None:
        run, self._run = self._run, 0
        if not run:
            return
        if self._opened_here:  # an info string holds no backticks, so this was an inline span
            self._fence, self._opened_here = 0, False
        elif self._fence:
            self._closing = run >= self._fence
        elif self._run_at_start and run >= 3:
            self._fence, self._opened_here = run, True
        elif not self._inline:
            self._inline = run
        elif run == self._inline:
            self._inline = 0


class TextChannel:
    """Holds back trailing characters of `gap` until it is known what follows them: text, markup or the end.

    Attributes:
        muted: text that is added is not passed on any more.
        lost: some of it was more than white space.
        leaked: a turn token that does not belong here was left out just now.
    """

    def __init__(self, emit: Callable[[str], None], *, gap: str) -> None:
        self.code = CodeTracker()
        self.muted = self.lost = False
        self._emit = emit
        self._chars = gap
        self._parts: list[str] = []
        self._gap = ""
        self._behind_leak = ""  # white space behind a turn token; it goes with the token unless text follows
        self.leaked = False
        self._last = ""

    @property
    def text(self) -> str:
        """Everything that was emitted."""
        return "".join(self._parts)

    @property
    def started(self) -> bool:
        """Whether anything was emitted, or it is muted."""
        return bool(self._parts) or self.muted

    @property
    def last(self) -> str:
        """The last character, held back or not."""
        return (self._last + self._gap + self._behind_leak)[-1:]

    def begin(self) -> None:
        """A new block: what is held back belongs between it and the last one."""
        if self._parts:
            self._gap = "\n"
        self._last = "\n"
        self.code = CodeTracker()

    def add(self, text: str) -> None:
        if not text:
            return
        self.code.add(text)
        if self.muted:
            self.lost = self.lost or not text.isspace()
            return
        if self.leaked:
            body = text.lstrip(self._chars)
            self._behind_leak += text[: len(text) - len(body)]
            if not body:
                return
            self._gap = self._gap + self._behind_leak if self._parts else ""
            self._behind_leak = ""
            self.leaked = False
            text = body
        text = self._gap + text
        body = text.rstrip(self._chars)
        self._gap = text[len(body) :]
        self._put(body)

    def drop_gap(self) -> None:
        """Markup follows."""
        self._gap = ""
        self._behind_leak = ""
        self.leaked = False

    def part(self) -> None:
        """What comes next begins a word of its own."""
        self._last = "\n"

    def flush(self) -> None:
        """What is held back is text."""
        self._put(self._gap + self._behind_leak)
        self.drop_gap()

    def end(self) -> None:
        """The text is complete: white space at its end stays, unless it stands behind a turn token."""
        self._put(self._gap)
        self.drop_gap()

    def clear(self) -> None:
        """Forgets the text so far: it was no visible text."""
        self._parts.clear()
        self.drop_gap()
        self._last = ""

    def _put(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        self._last = text[-1]
        self._emit(text)
