"""From a format's findings to tool-call events: ids, unknown names, calls planned and then made.

Two equal calls are two calls. One exception: a call inside reasoning was only planned there if the same one comes again
behind it, without an id. It is passed on once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from start_llm.core.events import Event, ToolCallDelta, ToolCallFinished, ToolCallStarted
from start_llm.core.messages import Tool, ToolCall
from start_llm.parsing.schema import ANY, Schema

type NewId = Callable[[], str]


class NotACall(Exception):
    """What looked like a call is none: its text is given back. Raised before any event of that call."""


class CallBuilder:
    """One call being written.

    It is held until it is complete if it may still turn out to be text (its tool is unknown), or one that was planned.
    """

    def __init__(self, log: CallLog, name: str, ident: str | None) -> None:
        self.name = name
        self.schema = log.schema(name)
        self._log = log
        self._ident = ident
        self._arguments: list[str] = []
        self._index = -1
        self._is_plan = log.in_reasoning
        if log.knows(name) and (ident or name not in {planned for planned, _ in log.plans}):
            self._start()

    def write(self, fragment: str) -> None:
        """The next piece of the arguments' JSON text."""
        if not fragment:
            return
        self._arguments.append(fragment)
        if self._index >= 0:
            self._log.emit(ToolCallDelta(self._index, fragment, self._log.choice))

    def finish(self, complete: bool) -> None:
        """The arguments are valid JSON now. `complete`: the markup ended as it should.

        Raises NotACall for an unknown tool's call that is not complete.
        """
        arguments = "".join(self._arguments)
        if not self._log.knows(self.name) and not complete:
            raise NotACall
        self._log.open = None
        if self._index < 0 and (self.name, arguments) in self._log.plans:
            self._log.made(self.name, arguments)
            return
        if self._index < 0:
            self._start()
        if self._is_plan:
            self._log.plans.append((self.name, arguments))
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
        begun: called before a call's first event, and when one was dropped.

    Attributes:
        finished: the calls so far.
        known_only: only calls of known tools count.
        in_reasoning: calls that begin now stand inside reasoning.
        plans: (name, arguments) of those that did, until they were made.
        dropped: how many were left out, since they had been planned.
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
        self.known_only = False
        self.in_reasoning = False
        self.plans: list[tuple[str, str]] = []
        self.dropped = 0
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

    def made(self, name: str, arguments: str) -> None:
        """A call that was planned, and so passed on already."""
        self.plans.remove((name, arguments))
        self.dropped += 1
        self._begun()
