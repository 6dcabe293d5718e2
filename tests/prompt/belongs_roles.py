"""Servers with one defect each in what they tell of another role: another system text, or tools that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from start_llm.core.messages import Message, Tool
from start_llm.core.request import ChatRequest
from tests.prompt.belongs_reference import AsSent, CallIdsAreNoProof, Node, Noting, OldestLast

ROLE_EVENTS = ("go on", "go on", "side role", "roles change")


class Roles(Noting):
    """Tells another system text as lines that are gone and lines that are new."""

    events = ROLE_EVENTS
    tenth = False


class RoleUntold(Roles):
    """Another system text is taken for a change that nobody has to be told."""

    def new(self, node: Node, lines: list[str]) -> list[str]:
        return []


class RoleBeforeTheOldText(Roles, OldestLast):
    """What holds no longer is told last."""


class RoleStays(AsSent):
    """A role that a side request had is told in the requests behind it."""

    groups = MappingProxyType({"private": True})
    events = ROLE_EVENTS

    def __init__(self, where: Any) -> None:
        super().__init__(where)
        self.role = ""

    def view(self, request: ChatRequest, messages: list[Message]) -> list[Message]:
        if "Rule number" not in messages[0].content:
            self.role = messages[0].content
        elif self.role and messages[-1].role == "user":
            messages[-1] = replace(
                messages[-1], content=f"<update-1>\n{self.role}\n</update-1>\n{messages[-1].content}"
            )
        return messages


class RoleOfAnyConversation(CallIdsAreNoProof):
    """Who asks for a role is given the last conversation of equal length, whose ever it is."""

    events = ROLE_EVENTS
    tenth = False


class ToolsStayUntold(Roles):
    """A request without tools is shown those of its conversation, and nothing takes them back."""

    def __init__(self, where: Any) -> None:
        super().__init__(where)
        self.tools: tuple[Tool, ...] = ()

    def same_owner(self, before: ChatRequest, now: ChatRequest) -> bool:
        return before.owner == now.owner and before.session == now.session and now.tools in ((), before.tools)

    def prepared(self, request: ChatRequest, messages: Sequence[Message], thinking: bool, **more: Any) -> Any:
        found = self.base(request) if more else None
        shown = request if found is None else found[0].request
        prepared = super().prepared(shown, messages, thinking, **more)
        prepared.request = shown
        return prepared


# With the property that each of them lacks.
ROLE_DEFECTS: dict[type[AsSent], str] = {
    RoleUntold: "b",
    RoleBeforeTheOldText: "b",
    RoleStays: "a",
    RoleOfAnyConversation: "a",
    ToolsStayUntold: "c",
}
