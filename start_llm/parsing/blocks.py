"""Reading blocks of calls, so that what turns out to be none can be given back."""

from __future__ import annotations

from start_llm.parsing.calls import CallLog, NotACall
from start_llm.parsing.source import Source, Step
from start_llm.parsing.tools.base import BlockReading, Parse


class Blocks:
    """Runs the formats' readers over the source. One thread.

    Attributes:
        inside: a block, or the header of one, is being read.
    """

    def __init__(self, source: Source, calls: CallLog) -> None:
        self.inside = False
        self._source = source
        self._calls = calls
        self._mark: int | None = None
        self._settled = False

    def read(self, parse: Parse, *, skip: int = 0, known_only: bool = False) -> Step[bool]:
        """Read a block of calls. False, and nothing consumed, if it is none.

        Args:
            skip: characters of the opener, which `parse` does not want to see.
            known_only: calls of unknown tools do not count.
        """
        source, self._calls.known_only, self._calls.open = self._source, known_only, None
        self._mark, self._settled, self.inside = source.mark(), False, True
        source.pos += skip
        try:
            yield from parse(BlockReading(source, self._calls, self._settle))
        except NotACall:
            if self._mark is not None:
                source.rewind(self._mark)
            return self._settled
        finally:
            self.inside = False
        if self._mark is not None:
            source.unmark(self._mark)
        return True

    def begun(self) -> None:
        """A call's first event is next, or one was dropped: nothing is given back any more."""
        if self._mark is not None:
            self._source.unmark(self._mark)
        self._mark = None
        self._settled = True

    def cut(self) -> None:
        """The answer ended inside the block: the call that is being read stays as it is."""
        if self._calls.open is not None:
            self._calls.open.cut()

    def _settle(self) -> None:
        """A call is done: what fails after it is given back from here on."""
        self.begun()
        self._mark = self._source.mark()
