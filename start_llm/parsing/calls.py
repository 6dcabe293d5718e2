"""From a format's findings to tool-call events: ids, duplicates, unknown names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from start_llm.core.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from start_llm.core.messages import Tool, ToolCall
from start_llm.parsing.schema import ANY, Schema

type NewId = Callable[[], str]


class NotACall(Exception):
    """What looked like a call is none: its text is given back. Raised before any event of that call."""


class CallBuilder:
    """One call being written. Its events are held back while it may still turn out to be nothing.

    A call of an unknown tool is held until it is complete. A call that repeats an
    earlier one is held while its arguments are the same, and dropped if they are the
    same to the end.
    """

    def __init__(self, log: CallLog, name: str, ident: str | None) -> None:
        self.name = name
        self.schema = log.schema(name)
        self._log = log
        self._ident = ident
        self._arguments: list[str] = []
        self._length = 0
        self._unknown = not log.knows(name)
        self._twins = [call.arguments for call in log.finished if call.name == name]
        self._index = -1
        if not self._unknown and not self._twins:
            self._start()

    def write(self, fragment: str) -> None:
        """The next piece of the arguments' JSON text."""
        if not fragment:
            return
        self._arguments.append(fragment)
        start, self._length = self._length, self._length + len(fragment)
        if self._index >= 0:
            self._log.emit(ToolCallDelta(self._index, fragment, self._log.choice))
            return
        self._twins = [twin for twin in self._twins if twin.startswith(fragment, start)]
        if not self._twins and not self._unknown:
            self._start()

    def finish(self, complete: bool) -> None:
        """The arguments are valid JSON now. `complete`: the markup ended as it should.

        Raises NotACall for an unknown tool's call that is not complete.
        """
        arguments = "".join(self._arguments)
        if self._unknown and not complete:
            raise NotACall
        self._log.open = None
        if self._index < 0 and arguments in self._twins:
            self._log.dropped()
            return
        if self._index < 0:
            self._start()
        self._log.finish(self._index, ToolCall(self._ident or "", self.name, arguments))

    def cut(self) -> None:
        """The answer ended inside this call: it stays as it is, so that nobody takes it for complete.

        One that the client has not been told of is dropped.
        """
        if self._index >= 0:
            self._log.finish(self._index, ToolCall(self._ident or "", self.name, "".join(self._arguments)))

    def _start(self) -> None:
        self._index, self._ident = self._log.start(self.name, self._ident)
        text = "".join(self._arguments)
        if text:
            self._log.emit(ToolCallDelta(self._index, text, self._log.choice))


class CallLog:
    """The calls of one choice, in order.

    Args:
        emit: takes the events.
        begun: called before a call's first event, and when a repeated call was dropped.

    Attributes:
        finished: the calls so far.
        repeated: calls that were dropped because they say what an earlier one said.
        known_only: only calls of known tools count.
        open: the call that is being read.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        emit: Callable[[Event], None],
        begun: Callable[[], None],
        new_id: NewId,
        choice: int,
    ) -> None:
        self.emit = emit
        self.choice = choice
        self.finished: list[ToolCall] = []
        self.repeated = 0
        self.known_only = False
        self.open: CallBuilder | None = None
        self._begun = begun
        self._new_id = new_id
        self._schemas = {tool.name: Schema(tool.parameters) for tool in tools}
        self._ids: set[str] = set()

    def knows(self, name: str) -> bool:
        return name in self._schemas

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def schema(self, name: str) -> Schema:
        return self._schemas.get(name) or Schema(ANY)

    def begin(self, name: str, ident: str | None = None) -> CallBuilder:
        """Raises NotACall where only known tools count and this is none."""
        name = self._resolved(name)
        if not name or (self.known_only and not self.knows(name)):
            raise NotACall
        self.open = CallBuilder(self, name, ident)
        return self.open

    def _resolved(self, name: str) -> str:
        """The tool that is meant by a name in its family's namespace."""
        plain = name.removeprefix("functions.").removesuffix(".call")
        return plain if plain in self._schemas and name not in self._schemas else name

    def start(self, name: str, ident: str | None) -> tuple[int, str]:
        index = len(self.finished)
        if not ident or ident in self._ids:
            ident = self._new_id()
        self._ids.add(ident)
        self._begun()
        self.emit(ToolCallStarted(index, ident, name, self.choice))
        return index, ident

    def finish(self, index: int, call: ToolCall) -> None:
        self.finished.append(call)
        self.emit(ToolCallFinished(index, call.id, call.name, call.arguments, self.choice))

    def dropped(self) -> None:
        self.repeated += 1
        self._begun()
