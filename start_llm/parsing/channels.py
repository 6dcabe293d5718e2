"""Text on its way out, without the white space that turns out to belong to markup."""

from __future__ import annotations

from collections.abc import Callable


class Channel:
    """Holds back trailing characters of `gap`, and leaked turn tokens, until it is known what follows them."""

    def __init__(self, emit: Callable[[str], None], *, gap: str) -> None:
        self._emit = emit
        self._chars = gap
        self._parts: list[str] = []
        self._gap = ""
        self._leaks = ""
        self._tail = ""
        self._block_empty = True

    @property
    def text(self) -> str:
        """Everything that was emitted."""
        return "".join(self._parts)

    @property
    def started(self) -> bool:
        """Whether anything was emitted."""
        return bool(self._parts)

    @property
    def last(self) -> str:
        """The last character, held back or not."""
        return (self._tail + self._gap + self._leaks)[-1:]

    @property
    def line_start(self) -> bool:
        """Only white space stands in the current line."""
        line = (self._tail + self._gap).rpartition("\n")[2]
        return not line.strip()

    def begin(self) -> None:
        """A new block: what is held back belongs between it and the last one."""
        if self._parts:
            self._gap = "\n"
        self._tail = "\n"

    def add(self, text: str, *, glue: bool = False) -> None:
        """`glue`: the text follows a call."""
        if not text:
            return
        if self._leaks:
            body = text.lstrip(self._chars)
            self._leaks += text[: len(text) - len(body)]
            text = body
            if not text:
                return
            if glue or not self._parts:
                self._gap += self._leaks[len(self._leaks.rstrip()) :] if glue else ""
            else:
                self._gap += self._leaks
            self._leaks = ""
        if glue and not self._parts:
            text, self._gap = text.lstrip(self._chars), ""
        text = self._gap + text
        body = text.rstrip(self._chars)
        self._gap = text[len(body) :]
        self._put(body)

    def leak(self, token: str) -> None:
        self._leaks += token

    def drop_gap(self) -> None:
        """Markup follows."""
        self._gap = self._leaks = ""

    def flush(self) -> None:
        """What is held back is text."""
        self._put(self._gap + self._leaks)
        self.drop_gap()

    def end(self) -> None:
        """The text is complete: leaked tokens at its end go, white space before them stays."""
        self._put(self._gap)
        self.drop_gap()

    def _put(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._tail = (self._tail + text).rpartition("\n")[2] if "\n" not in text else text[text.rindex("\n") :]
            self._emit(text)
