"""A simulated agent: it asks, runs the tools it is told to run, and sends its history back the way real clients do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from scripts.bench.client import Reply

Json = dict[str, Any]


class Asker(Protocol):
    """Sends a request and keeps the books; `wrong` says what is wrong with a reply, or nothing."""

    def ask(self, messages: list[Json], tools: list[Json], wrong: Callable[[Reply], str | None]) -> Reply: ...


@dataclass(frozen=True)
class Style:
    """How a client sends an assistant turn back.

    Attributes:
        reasoning: left out, in ``reasoning_content``, or there and once more in the content.
        arguments: the text as it came, compact JSON, JSON with sorted keys, or a JSON object instead of text.
    """

    reasoning: Literal["strip", "echo", "doubled"] = "echo"
    arguments: Literal["as_is", "compact", "sorted", "object"] = "as_is"

    def _arguments(self, text: str) -> Any:
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return text
        match self.arguments:
            case "compact":
                return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            case "sorted":
                return json.dumps(value, sort_keys=True)
            case "object":
                return value
            case _:
                return text

    def assistant(self, reply: Reply) -> Json:
        """The message that stands for `reply` in later requests."""
        message: Json = {"role": "assistant", "content": reply.content.strip() or None}
        if reply.reasoning.strip() and self.reasoning != "strip":
            message["reasoning_content"] = reply.reasoning.strip()
            if self.reasoning == "doubled":
                message["content"] = f"<think>\n{reply.reasoning.strip()}\n</think>\n\n{reply.content.strip()}"
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call.arguments)},
                }
                for call in reply.calls
            ]
        return message


@dataclass(frozen=True)
class Step:
    """One generation: what the model is to say, and what the tool then answers."""

    text: str
    reasoning: str = ""
    call: tuple[str, Json] | None = None
    result: str = ""

    def raw(self, suffix: str = "") -> str:
        """The text as the model writes it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        call = ""
        if self.call:
            body = json.dumps({"name": self.call[0], "arguments": self.call[1]})
            call = f"\n<tool_call>\n{body}\n</tool_call>"
        return thought + self.text + suffix + call


class Drift(Protocol):
    """What a client changes in its own history from request to request.

    `shows`: the line of its system text that says which client it is; empty for any.
    """

    shows: str

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        """The messages of request number `n` (from 0); `messages` must not be changed."""
        ...

    def value(self, n: int) -> str | None:
        """A text that the model must be able to see in request `n`, and not in another one's place."""
        ...


class NoDrift:
    shows = ""

    def apply(self, messages: list[Json], n: int) -> list[Json]:
        return messages

    def value(self, n: int) -> str | None:
        return None


_MARK = re.compile(r"<(/?(?:think|tool_call))>")
FOUND = re.compile(r"\(now (\d+)@(-?\d+), before (\d+)@(-?\d+)\)$")


def judge(reply: Reply, step: Step, suffix: str) -> str | None:
    """What is wrong with the answer to a scripted step, or ``None``."""
    if reply.error:
        return reply.error
    content = reply.content.strip()
    if suffix:
        match = FOUND.search(content)
        if not match:
            return f"no find result in {content[-200:]!r}"
        now, now_at, _, before_at = map(int, match.groups())
        if not now:
            return "the current value is not visible"
        if now_at < before_at:
            return "an old value stands behind the current one"
        content = content[: match.start()]
    if content.strip() != step.text.strip():
        return f"said {content[:200]!r} instead of {step.text[:80]!r}"
    if reply.reasoning.strip() != step.reasoning.strip():
        return f"reasoned {reply.reasoning[:200]!r} instead of {step.reasoning[:80]!r}"
    got = [(call.name, call.arguments) for call in reply.calls]
    if [name for name, _ in got] != ([step.call[0]] if step.call else []):
        return f"called {got} instead of {step.call}"
    if step.call and json.loads(got[0][1]) != step.call[1]:
        return f"called {got} instead of {step.call}"
    return None


@dataclass
class Agent:
    """One session of one client."""

    asker: Asker
    system: str
    tools: list[Json]
    style: Style = field(default_factory=Style)
    drift: Drift = field(default_factory=NoDrift)
    messages: list[Json] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "system", "content": self.system}]

    def _suffix(self, n: int) -> str:
        if (value := self.drift.value(n)) is None:
            return ""
        before = self.drift.value(n - 1) if n else None
        return f" (now {{find: {value}}}, before {{find: {before or 'never said'}}})"

    def turn(self, task: str, steps: list[Step]) -> None:
        """A user message and all that follows from it."""
        suffixes = [self._suffix(self.requests + i) for i in range(len(steps))]
        texts = [step.raw(suffix) for step, suffix in zip(steps, suffixes, strict=True)]
        # Our server spells marks in letters where a user writes them: more tokens, which no client's work has.
        script = _MARK.sub(r"{\1}", "[[next]]".join(texts))
        self.messages.append({"role": "user", "content": f"{task}\n[[script]]{script}[[end]]"})
        for step, suffix in zip(steps, suffixes, strict=True):
            reply = self.ask(step, suffix)
            self.messages.append(self.style.assistant(reply))
            for call in reply.calls:
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": step.result})

    def ask(self, step: Step, suffix: str = "") -> Reply:
        """Sends the history as it stands; nothing is appended."""
        messages = self.drift.apply(self.messages, self.requests)
        self.requests += 1
        return self.asker.ask(messages, self.tools, lambda reply: judge(reply, step, suffix))

    def branch(self, system: str | None = None, tools: list[Json] | None = None) -> Agent:
        """Another session that goes on from this one's history, with another system text or other tools perhaps."""
        messages, system = list(self.messages), system or self.system
        messages[0] = {"role": "system", "content": system}
        tools = self.tools if tools is None else tools
        return Agent(self.asker, system, tools, self.style, self.drift, messages, self.requests)
