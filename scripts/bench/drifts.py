"""What clients change in their own history from request to request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

CLAUDE_CODE = "You are Claude Code, Anthropic's official CLI for Claude."
OPENCLAW = "You are a personal assistant running inside OpenClaw."


def _with_text(message: Json, text: str) -> Json:
    return {**message, "content": text}


@dataclass(frozen=True)
class Clock:
    """A line in the system prompt that tells the time of the request."""

    shows = ""

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        head, *rest = messages
        lines = head["content"].split("\n")
        lines.insert(2, f"Current time is {self.value(n)}")
        return [_with_text(head, "\n".join(lines)), *rest]

    def value(self, n: int) -> str:
        return f"2026-11-21 10:{n // 60 + 5:02d}:{n % 60:02d} UTC"


@dataclass(frozen=True)
class Customer:
    """A line in the system prompt that names a customer: after three requests it is another one."""

    shows = ""

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        head, *rest = messages
        lines = head["content"].split("\n")
        lines.insert(2, f"The customer is {self.value(n)}.")
        return [_with_text(head, "\n".join(lines)), *rest]

    def value(self, n: int) -> str:
        return "Alicia Arnold" if n < 3 else "Robert Brandt"


@dataclass(frozen=True)
class Billing:
    """A telemetry line at the head of the system prompt; nothing that the model must see."""

    shows = CLAUDE_CODE

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        head, *rest = messages
        line = f"x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n * 7919 + 13:05x};"
        return [_with_text(head, f"{line}\n{head['content']}"), *rest]

    def value(self, n: int) -> None:
        return None


@dataclass(frozen=True)
class Reminder:
    """A reminder at the end of the newest user message; it moves on, and its text changes."""

    shows = CLAUDE_CODE

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        text = f"{messages[last]['content']}\n<system-reminder>\n{self.value(n)}\n</system-reminder>"
        return [*messages[:last], _with_text(messages[last], text), *messages[last + 1 :]]

    def value(self, n: int) -> str:
        return f"Your todo list has changed. {n + 3} items are open, item {n * 37 + 11} is the next one."


@dataclass(frozen=True)
class MessageId:
    """Inbound context in the first user message, with the id of the message that is answered just now."""

    shows = OPENCLAW

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        head, first, *rest = messages
        context = (
            f'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{self.value(n)}"\n}}\n```\n\n'
        )
        return [head, _with_text(first, context + first["content"]), *rest]

    def value(self, n: int) -> str:
        return f"msg-{n * 104729 + 1000003:x}"
