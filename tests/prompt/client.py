"""A client and a model in one: keeps a conversation, sends it in a client's way, answers with raw generated tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.prompt.hf import HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared
from tests.parsing.formats import RENDER
from tests.prompt.models import EOS, model

CLEARED = "[Old tool result content cleared]"
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."
OPENCLAW = "You are a personal assistant running inside OpenClaw."
OPENCODE = "You are opencode, an interactive CLI tool."
INTERNAL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive sessions: {}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
# What a change is told in may be a tenth of what was sent.
RULES = "\n".join(f"Rule {n}: keep every change small and say what was done." for n in range(90))


def system_text(first: str, *lines: str) -> Message:
    """A system text with enough in it to tell a change of its lines."""
    return Message("system", "\n".join([first, *lines, RULES]))


READ = Tool("read", "Reads a file", {"type": "object", "properties": {"path": {"type": "string"}}})
BASH = Tool("bash", "Runs a command", {"type": "object", "properties": {"command": {"type": "string"}}})
EDIT = Tool("edit", "Edits a file", {"type": "object", "properties": {"path": {"type": "string"}}})


@lru_cache
def settings(**changes: Any) -> Settings:
    """Read once for the same changes: pydantic reads the environment for longer than a short conversation takes."""
    return Settings(_env_file=None, **changes)  # type: ignore[call-arg]


PARTS = ("clients", "store", "context", "now")


def pipeline(family: str, **given: Any) -> Pipeline:
    """Of a model, with the given parts and settings."""
    parts = {name: given.pop(name) for name in PARTS if name in given}
    return Pipeline(*model(family), settings=settings(**given), **parts)


def request(messages: list[Message], tools: tuple[Tool, ...] = (), **more: Any) -> ChatRequest:
    return ChatRequest("id", "chat", "m", messages=tuple(messages), tools=tools, **more)


def raw_answer(family: str, answer: Message, opened: bool) -> str:
    """What a model of this family generates for `answer`; `opened`: the prompt has opened the reasoning block."""
    text = ""
    if family == "harmony":
        if answer.reasoning is not None:
            text = f"<|channel|>analysis<|message|>{answer.reasoning}<|end|><|start|>assistant"
        if not answer.tool_calls:
            return f"{text}<|channel|>final<|message|>{answer.content}"
        call = answer.tool_calls[0]
        return f"{text} to=functions.{call.name}<|channel|>commentary json<|message|>{call.arguments}"
    if answer.reasoning is not None:
        text = f"{'' if opened else '<think>' + chr(10)}{answer.reasoning}\n</think>\n\n"
    elif opened:
        text = "\n</think>\n\n"
    form = RENDER["glm47" if family == "glm4" else "hermes_json"]
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return text + answer.content + "".join(f"\n{form([call])}" for call in calls)


def odd_tokens(tokenizer: HFTokenizer, text: str, seed: int = 1) -> list[int]:
    """Tokens of `text` as no tokenizer would choose them: cut at random places."""
    chooser = random.Random(seed)
    tokens: list[int] = []
    specials = "|".join(re.escape(name) for name in tokenizer.special_tokens)
    while text:
        special = re.match(specials, text)
        size = special.end() if special else chooser.randint(1, 5)
        if not special and (later := re.search(specials, text[1:])):
            size = min(size, 1 + later.start())
        tokens += tokenizer.encode(text[:size])
        text = text[size:]
    return tokens


def same(message: Message) -> Message:
    return message


def stripped(message: Message) -> Message:
    return replace(message, reasoning=None)


def reserialised(message: Message) -> Message:
    """Compact arguments with sorted keys, other ids, trimmed text."""
    calls = tuple(
        ToolCall(
            call.id.replace("_", ""),
            call.name,
            json.dumps(json.loads(call.arguments), separators=(",", ":"), sort_keys=True),
        )
        for call in message.tool_calls
    )
    return replace(message, content=message.content.strip(), tool_calls=calls)


def in_content(message: Message) -> Message:
    """Reasoning echoed inside the content."""
    if message.reasoning is None:
        return message
    return replace(message, content=f"<think>\n{message.reasoning}\n</think>\n\n{message.content}", reasoning=None)


def doubled(message: Message) -> Message:
    return replace(in_content(message), reasoning=message.reasoning)


ECHOES: dict[str, Callable[[Message], Message]] = {
    "kept": same,
    "stripped": stripped,
    "reserialised": reserialised,
    "stripped and reserialised": lambda message: stripped(reserialised(message)),
    "in content": in_content,
    "doubled": doubled,
}


@dataclass
class Client:
    """A conversation. `messages` is the client's own history, answers written down in its way."""

    family: str
    pipe: Pipeline
    echo: Callable[[Message], Message] = same
    tools: tuple[Tool, ...] = (READ, BASH)
    thinking: bool = True
    session: str | None = None
    owner: str | None = None
    messages: list[Message] = field(default_factory=list)
    spoken: tuple[int, ...] = ()
    prepared: Prepared | None = None
    count: int = 0

    @property
    def text(self) -> str:
        """What the model is shown now."""
        assert self.prepared is not None
        return model(self.family)[1].decode(self.prepared.prompt.tokens)

    def ask(self, *new: Message) -> Prepared:
        self.messages += new
        asked = request(self.messages, self.tools, session=self.session, owner=self.owner)
        self.prepared = self.pipe.prepare(asked, thinking=self.thinking)
        return self.prepared

    def goes_on(self, prepared: Prepared) -> bool:
        """Whether it begins with all that was shown and generated in the turn before."""
        return prepared.prompt.tokens[: len(self.spoken)] == self.spoken

    def answer(self, answer: Message, stop: str | None = None) -> tuple[int, ...]:
        """Generates `answer`; returns prompt and generated tokens without the one that ended the turn."""
        assert self.prepared is not None
        tokenizer = model(self.family)[1]
        if self.family in ("gemma", "llama3", "mistral"):
            answer = replace(answer, reasoning=None)
        text = raw_answer(self.family, answer, self.prepared.rendering.in_reasoning)
        self.count += 1
        tokens = odd_tokens(tokenizer, text, self.count)
        end = tokenizer.special_tokens[stop or EOS[self.family][0]]
        self.pipe.record(self.prepared, answer, [*tokens, end])
        self.messages.append(self.echo(answer))
        self.spoken = (*self.prepared.prompt.tokens, *tokens)
        return self.spoken


def numbered(number: int) -> str:
    """A call id as the server makes them: random letters."""
    return f"call_{random.Random(number).getrandbits(96):024x}"


def say(text: str = "", reasoning: str | None = "Let me see.", number: int | None = None, **calls: Any) -> Message:
    """`number`: of the id of its only call, else that is named after its tool."""
    made = (
        ToolCall(f"call_{name}" if number is None else numbered(number), name, json.dumps(arguments))
        for name, arguments in calls.items()
    )
    return Message("assistant", text, reasoning, tuple(made))


def talk(turns: int = 3, family: str = "chatml", system: Message | None = None, **more: Any) -> Client:
    """A conversation with calls of this server; what has been said last ends it."""
    client = Client(family, pipeline(family), **more)
    client.ask(system or system_text("You are a coding agent."), Message("user", f"Go. {RULES}"))
    for number in range(turns):
        client.answer(say(f"Step {number}.", None, number, read={"path": f"{number}.py"}))
        client.ask(Message("tool", f"File {number}: {RULES}", tool_call_id=numbered(number)))
    client.answer(say("Done.", None))
    return client
