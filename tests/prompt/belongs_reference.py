"""Servers that are right by being simple, and servers with one defect each: the properties must tell them apart.

`AsSent` shows every request as it came. `Noting` keeps an old system text and tells what changed in it, in a
conversation that it knows by the id of a tool call. Each of the others differs from one of them in one thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from start_llm.core.messages import Message, ToolCall
from start_llm.core.request import ChatRequest
from tests.prompt.belongs_clients import CLEARED
from tests.prompt.belongs_events import EVENTS
from tests.prompt.belongs_model import remembering
from tests.prompt.belongs_reading import rendering
from tests.prompt.belongs_story import NAMES
from tests.prompt.belongs_world import Premises

BACKEND = NAMES.index((None, "backend"))
NOW = re.compile(r"Now it is \S+ UTC\.")
BILLING = re.compile(r"x-anthropic-billing-header: .*\n")
CLAUDE = "You are Claude Code"


class AsSent:
    # What groups, policy and events of a story must be for the defect to show soon.
    groups: Mapping[str, Any] = MappingProxyType({})
    policy = "append"
    events = tuple(name for name, _ in EVENTS)

    def __init__(self, where: Premises) -> None:
        self.where = where
        self.strict = where.policy == "strict"

    def prepare(self, request: ChatRequest, *, thinking: bool) -> SimpleNamespace:
        messages = list(request.messages)
        if not self.strict and CLAUDE in messages[0].content:
            messages[0] = replace(messages[0], content=BILLING.sub("", messages[0].content, count=1))
        return self.prepared(request, self.view(request, messages), thinking)

    def prepared(self, request: ChatRequest, messages: Sequence[Message], thinking: bool, **more: Any) -> Any:
        text = rendering(messages, request.tools, self.where.family, thinking)
        tokens = tuple(remembering(self.where.family)[1].encode(text))
        opened = text.endswith("<think>\n")
        prompt, rendered = SimpleNamespace(tokens=tokens), SimpleNamespace(in_reasoning=opened)
        return SimpleNamespace(prompt=prompt, rendering=rendered, notes=(), request=request, shown=messages, **more)

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        """What is shown of the request's messages."""
        return messages

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Node:
    """A turn: its request, what was shown, the answer, and the characters of all notes in it."""

    request: ChatRequest
    shown: list[Message]
    answer: Message
    notes: int = 0
    told: set[str] = field(default_factory=set)


def plain_id(call_id: str | None) -> str:
    return (call_id or "").replace("_", "")


class Noting(AsSent):
    groups = MappingProxyType({"kind": "unknown"})
    events = ("go on", "go on", "line changes", "line goes", "many lines")
    tenth = True

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.nodes: dict[str, Node] = {}

    def prepare(self, request: ChatRequest, *, thinking: bool) -> Any:
        found = None if self.strict else self.base(request)
        if found is None:
            return super().prepare(request, thinking=thinking)
        node, index = found
        messages = list(request.messages)
        note = self.note(node, request)
        given = messages[index]
        if _calls(given) == _calls(node.answer):  # what a client changed was not thought
            given = replace(given, reasoning=given.reasoning or self.reasoning(node))
        shown = [*node.shown, given, *messages[index + 1 :]]
        if note:
            shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n\n{note}")
        size = node.notes + len(note)
        if self.tenth and self.too_long(shown, messages, size):
            return super().prepare(request, thinking=thinking)
        prepared = self.prepared(request, shown, thinking, size=size)
        if 0 < self.where.context < len(prepared.prompt.tokens):
            return super().prepare(request, thinking=thinking)
        prepared.notes = tuple(note.split("\n"))
        return prepared

    def too_long(self, shown: Sequence[Message], sent: Sequence[Message], notes: int) -> bool:
        total = sum(len(message.content) for message in sent)
        return notes > total / 10 or len(shown[0].content) + notes > 1.1 * len(sent[0].content)

    def base(self, request: ChatRequest) -> tuple[Node, int] | None:
        for index in range(len(request.messages) - 1, -1, -1):
            message = request.messages[index]
            node = self.nodes.get(plain_id(message.tool_calls[0].id)) if message.tool_calls else None
            if node is not None and self.continues(node, request, index):
                return node, index
        return None

    def continues(self, node: Node, request: ChatRequest, index: int) -> bool:
        before = node.request
        last = request.messages[-1].role in ("user", "tool") and "BEGIN_OPENCLAW" not in request.messages[-1].content
        return last and self.same_owner(before, request) and _faces(before) == _faces(request, index)

    def same_owner(self, before: ChatRequest, now: ChatRequest) -> bool:
        return before.owner == now.owner and before.session == now.session and before.tools == now.tools

    def reasoning(self, node: Node) -> str | None:
        return node.answer.reasoning

    def note(self, node: Node, request: ChatRequest) -> str:
        before, now = (BILLING.sub("", r.messages[0].content).split("\n") for r in (node.request, request))
        gone, new = [line for line in before if line not in now], [line for line in now if line not in before]
        return self.frame(request, self.gone(gone) + self.new(node, new))

    def frame(self, request: ChatRequest, lines: list[str]) -> str:
        tag = f"update-{len(request.messages[0].content) % 89}f{id(self) % 97}"
        return "\n".join([f"<{tag}>", *lines, f"</{tag}>"]) if lines else ""

    def gone(self, lines: list[str]) -> list[str]:
        return ["These lines of the system text no longer hold:", *lines] if lines else []

    def new(self, node: Node, lines: list[str]) -> list[str]:
        return ["These lines of the system text hold now:", *lines] if lines else []

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        if answer.tool_calls:
            node = Node(prepared.request, list(prepared.shown), answer, getattr(prepared, "size", 0))
            self.nodes[plain_id(answer.tool_calls[0].id)] = node


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def _faces(request: ChatRequest, end: int | None = None) -> list[tuple[Any, ...]]:
    return [
        (m.role, m.content, m.reasoning, tuple(c.arguments for c in m.tool_calls), m.tool_call_id)
        for m in request.messages[1:end]
    ]


# --- one defect each: what is shown of messages that came without an answer of ours ------


class StrangersReasoning(AsSent):
    """Gives an answer the thoughts that were last had for the same words."""

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.thoughts: dict[str, str | None] = {}

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        return [
            replace(m, reasoning=self.thoughts.get(m.content)) if m.role == "assistant" and not m.reasoning else m
            for m in messages
        ]

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        self.thoughts[answer.content] = answer.reasoning


class EqualTurnsMix(StrangersReasoning):
    """The same, but only behind the same messages: two conversations of equal words."""

    groups = MappingProxyType({"private": False, "size": 2, "echo": 0})

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        result = list(messages)
        for index, message in enumerate(messages):
            if message.role == "assistant" and not message.reasoning:
                thought = self.thoughts.get(repr([m.content for m in messages[1 : index + 1]]))
                result[index] = replace(message, reasoning=thought)
        return result

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        key = repr([m.content for m in (*prepared.request.messages[1:], answer)])
        self.thoughts[key] = answer.reasoning


class RewritesQuestions(AsSent):
    """Leaves a line out wherever it looks like telemetry."""

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        return [messages[0], *(replace(m, content=BILLING.sub("", m.content)) for m in messages[1:])]


class KeepsResults(AsSent):
    """A result that its client took back is shown as the newest one of any conversation."""

    events = ("go on", "go on", "clear", "fork", "stranger")

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.result = ""

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        result = [replace(m, content=self.result) if m.content == CLEARED else m for m in messages]
        self.result = next((m.content for m in reversed(messages) if m.role == "tool"), self.result)
        return result


class HidesSecondBlock(AsSent):
    """Of two messages in a row that consist of a declared block, one is shown."""

    groups = MappingProxyType({"kind": "claude"})
    events = ("go on", "block messages")

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        alone = [message.role == "user" and message.content.startswith("<system-reminder>") for message in messages]
        pairs = zip(messages, alone, [False, *alone], strict=False)
        return [message for message, block, before in pairs if not (block and before)]


class DropsDefaults(AsSent):
    """A call is shown without members that say nothing."""

    groups = MappingProxyType({"kind": "unknown"})
    events = ("go on", "default comes")

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        return [replace(m, tool_calls=tuple(map(self.plainer, m.tool_calls))) for m in messages]

    def plainer(self, call: ToolCall) -> ToolCall:
        kept = {name: value for name, value in json.loads(call.arguments).items() if value}
        return replace(call, arguments=json.dumps(kept))


class CountsForAll(AsSent):
    """What anybody has sent before is not new for anybody."""

    events = ("go on", "guessed")

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.said: set[str] = set()

    def prepared(self, request: ChatRequest, messages: Sequence[Message], thinking: bool, **more: Any) -> Any:
        new = sum(message.content not in self.said for message in messages)
        return super().prepared(request, messages, thinking, new=new, **more)

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        self.said.update(message.content for message in prepared.request.messages)


class ForgetsTheTime(AsSent):
    """Shows the clock of a conversation's first turn, and tells no other."""

    groups = MappingProxyType({"kind": "unknown"})
    events = ("go on", "clock ticks")

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.heads: dict[str, str] = {}

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        head = messages[0].content
        known = self.heads.setdefault(NOW.sub("", head) + messages[1].content, head)
        return [replace(messages[0], content=known), *messages[1:]]


class StrictIsNot(AsSent):
    """Leaves telemetry out under ``strict`` too."""

    groups = MappingProxyType({"kind": "claude"})
    policy = "strict"

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.strict = False


# --- one defect each: a known conversation -------------------------------------------------


class ForgetsWithdrawals(Noting):
    def gone(self, lines: list[str]) -> list[str]:
        return []


class StaleWithoutNote(Noting):
    def note(self, node: Node, request: ChatRequest) -> str:
        return ""


class ReturnsUntold(Noting):
    """What was told once is not told again, though it was something else in between."""

    def __init__(self, where: Premises) -> None:
        super().__init__(where)
        self.told: set[str] = set()

    def new(self, node: Node, lines: list[str]) -> list[str]:
        fresh = [line for line in lines if line not in self.told and line not in node.shown[0].content]
        self.told.update(fresh)
        return super().new(node, fresh)


class OldestLast(Noting):
    def note(self, node: Node, request: ChatRequest) -> str:
        before, now = (BILLING.sub("", r.messages[0].content).split("\n") for r in (node.request, request))
        gone, new = [line for line in before if line not in now], [line for line in now if line not in before]
        return self.frame(request, self.new(node, new) + self.gone(gone))


class NoTenth(Noting):
    """Keeps whatever it showed, however much of it is told away."""

    tenth = False


class CallIdsAreNoProof(Noting):
    """Goes on from the last answer with calls, whose ever it was."""

    groups = MappingProxyType({"kind": "unknown", "size": 2, "private": False, "echo": 0, "thinking": True})
    events = ("go on",)

    def record(self, prepared: Any, answer: Message, tokens: Sequence[int]) -> None:
        super().record(prepared, answer, tokens)
        if answer.tool_calls:
            self.nodes = dict.fromkeys(self.nodes, self.nodes[plain_id(answer.tool_calls[0].id)])

    def continues(self, node: Node, request: ChatRequest, index: int) -> bool:
        return len(node.request.messages) == index


class JoinsByUser(CallIdsAreNoProof):
    """One user's conversations with equal words are one conversation, whatever their customers are called."""

    groups = MappingProxyType(dict(CallIdsAreNoProof.groups) | {"names": BACKEND})


# With the property that each of them lacks.
DEFECTS: dict[type[AsSent], str] = {
    StrangersReasoning: "a",
    EqualTurnsMix: "a",
    RewritesQuestions: "b",
    KeepsResults: "a",
    StrictIsNot: "e",
    ForgetsWithdrawals: "c",
    StaleWithoutNote: "b",
    ReturnsUntold: "b",
    OldestLast: "b",
    NoTenth: "d",
    CallIdsAreNoProof: "a",
    HidesSecondBlock: "b",
    DropsDefaults: "b",
    CountsForAll: "f",
    JoinsByUser: "a",
    ForgetsTheTime: "b",
}
