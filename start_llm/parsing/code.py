"""Whether visible text stands inside Markdown code: markup quoted there is talked about, not meant.

More forgiving than CommonMark, since a fence taken wrongly would hide every call after it: a fence may open after
other text in its line, and may close at the end of a line of code.
"""

from __future__ import annotations

import re

_BREAKS = re.compile(r"\n|`+")


class CodeTracker:
    """Follows fences (three or more backticks) and inline spans (which end with their line).

    O(new text). Runs of backticks may be split between calls of `add`.
    """

    def __init__(self) -> None:
        self._fence = 0
        self._inline = 0
        self._run = 0
        self._line_start = True
        self._run_at_start = False
        self._closing = False
        self._opened_here = False

    def add(self, text: str) -> None:
        at = 0
        for match in _BREAKS.finditer(text):
            self._plain(text[at : match.start()])
            if match.group() == "\n":
                self._end_run()
                self._newline()
            else:
                if not self._run:
                    self._run_at_start = self._line_start
                self._run += len(match.group())
                self._line_start = False
            at = match.end()
        self._plain(text[at:])

    @property
    def inside(self) -> bool:
        """For the character that comes next, which is no backtick."""
        self._end_run()
        return bool(self._inline or (self._fence and not self._closing))

    @property
    def line_start(self) -> bool:
        """Nothing but white space stands before the next character in its line."""
        return self._line_start

    def _plain(self, text: str) -> None:
        if not text:
            return
        self._end_run()
        if not text.isspace():
            self._line_start = False
            self._closing = False

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

    def _newline(self) -> None:
        if self._closing:
            self._fence = 0
        elif self._inline >= 3:
            self._fence = self._inline
        self._closing = False
        self._opened_here = False
        self._inline = 0
        self._line_start = True
