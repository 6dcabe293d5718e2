"""Text on its way out, without the white space that turns out to belong to markup."""

from __future__ import annotations

from collections.abc import Callable


class Channel:
    """Holds back trailing characters of `gap` until it is known what follows them: text, markup or the end."""

    def __init__(self, emit: Callable[[str], None], *, gap: str) -> None:
        self._emit = emit
        self._chars = gap
        self._parts: list[str] = []
        self._gap = ""
        self._behind_leak = ""  # white space behind a turn token; it goes with the token unless text follows
        self._leaked = False
        self._last = ""
        self._blank_line = True

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
        return (self._last + self._gap + self._behind_leak)[-1:]

    @property
    def line_start(self) -> bool:
        """Only white space stands in the current line."""
        return self._blank_line or "\n" in self._gap or "\n" in self._behind_leak

    def begin(self) -> None:
        """A new block: what is held back belongs between it and the last one."""
        if self._parts:
            self._gap = "\n"
        self._last, self._blank_line = "\n", True

    def add(self, text: str) -> None:
        if not text:
            return
        if self._leaked:
            body = text.lstrip(self._chars)
            self._behind_leak += text[: len(text) - len(body)]
            if not body:
                return
            gap = self._gap + self._behind_leak if self._parts else ""
            self._gap, self._behind_leak, self._leaked = gap, "", False
            text = body
        text = self._gap + text
        body = text.rstrip(self._chars)
        self._gap = text[len(body) :]
        self._put(body)

    def leak(self) -> None:
        """A turn token that does not belong here was left out."""
        self._leaked = True

    def drop_gap(self) -> None:
        """Markup follows."""
        self._gap, self._behind_leak, self._leaked = "", "", False

    def flush(self) -> None:
        """What is held back is text."""
        self._put(self._gap + self._behind_leak)
        self.drop_gap()

    def end(self) -> None:
        """The text is complete: white space at its end stays, unless it stands behind a turn token."""
        self._put(self._gap)
        self.drop_gap()

    def clear(self) -> None:
        """Everything so far was something else."""
        self._parts.clear()
        self.drop_gap()
        self._last, self._blank_line = "", True

    def _put(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        self._last = text[-1]
        line = text.rpartition("\n")[2]
        self._blank_line = not line.strip() and (self._blank_line or len(line) < len(text))
        self._emit(text)
