"""Asks a live server in either dialect, in one notation (OpenAI's messages), and tells what was really shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.integration.live import Live
from tests.model_thread import on_model_thread
from tests.oracle import TEMPLATES, expected_truth, make_tokenizer

Json = dict[str, Any]
DIALECTS = ("chat", "messages")
KINDS = ["plain", pytest.param("hybrid", marks=pytest.mark.slow)]
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "line": 1}}\n</tool_call>'


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def said(text: str, *calls: Json) -> Json:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def result(call: Json, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def cues(*texts: str) -> str:
    """What is asked of the model: how often it sees each of the texts, outside of this cue."""
    return "\n[[truth]] " + " ".join(f"[[find: {text}]]" for text in texts)


@dataclass
class Heard:
    """An answer.

    Attributes:
        message: as the client writes it down, reasoning included.
        prompt: the text that the model was shown, and its `tokens`.
    """

    message: Json
    prompt: str
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        return str(self.message["content"] or "")

    @property
    def stripped(self) -> Json:
        """The message without its reasoning."""
        return {name: value for name, value in self.message.items() if name != "reasoning_content"}

    @property
    def call(self) -> Json:
        (call,) = self.message["tool_calls"]
        return dict(call)

    def found(self) -> list[tuple[int, int]]:
        """What the model found for the cues ``[[find: ...]]``: how often, and in which message last."""
        lines = self.text.split("\n")
        (line,) = (line for line in lines if line.startswith("find: "))
        if len(lines[0]) == 16:
            assert lines[0] == expected_truth(self.tokens), "the model saw another prompt than it was given"
        pairs = (word.split("@") for word in line.removeprefix("find: ").split())
        return [(int(times), int(last)) for times, last in pairs]


@dataclass
class Asker:
    """A client. `who`: ``user`` of the one dialect, ``metadata.user_id`` of the other."""

    server: Live
    dialect: str = "chat"
    who: str | None = None

    def ask(self, messages: list[Json], tools: list[Json] | None = None) -> Heard:
        body, path = (self._chat if self.dialect == "chat" else self._messages)(messages, tools or [])
        response = httpx.post(f"{self.server.url}{path}", json=body)
        data = response.json()
        assert response.status_code == 200, data
        message = data["choices"][0]["message"] if self.dialect == "chat" else _as_openai(data["content"])
        tokens = self.server.prompts[data["id"]]
        text = on_model_thread(self.server.app, lambda _, wrapper: wrapper.decode(list(tokens)))
        kept = {name: message[name] for name in ("reasoning_content", "tool_calls") if message.get(name)}
        return Heard({"role": "assistant", "content": message.get("content") or "", **kept}, str(text), tokens)

    def _chat(self, messages: list[Json], tools: list[Json]) -> tuple[Json, str]:
        body: Json = {"model": "default", "messages": messages, "enable_thinking": True}
        body |= {"tools": tools} if tools else {}
        return body | ({"user": self.who} if self.who else {}), "/v1/chat/completions"

    def _messages(self, messages: list[Json], tools: list[Json]) -> tuple[Json, str]:
        body: Json = {"model": "default", "max_tokens": 2000, "messages": []}
        if messages[0]["role"] == "system":
            body["system"], messages = messages[0]["content"], messages[1:]
        body["messages"] = [_as_anthropic(message) for message in messages]
        if tools:
            functions = [tool["function"] for tool in tools]
            body["tools"] = [
                {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
            ]
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        return body | ({"metadata": {"user_id": self.who}} if self.who else {}), "/v1/messages"


def _as_anthropic(message: Json) -> Json:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    blocks: list[Json] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return {"role": message["role"], "content": blocks}


def _as_openai(blocks: list[Json]) -> Json:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return {"content": "\n".join(texts), "reasoning_content": "\n".join(thoughts), "tool_calls": calls}


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())


class Rendering:
    """The oracle's template applied to a client's messages, with nothing of the server in between."""

    def __init__(self) -> None:
        self._tokenizer = _tokenizer()

    def text(self, messages: list[Json], tools: list[Json] | None = None) -> str:
        how: Any = {"chat_template": TEMPLATES["plain"], "add_generation_prompt": True, "enable_thinking": True}
        return str(self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **how))

    def tokens(self, messages: list[Json], tools: list[Json] | None = None) -> int:
        return len(self._tokenizer.encode(self.text(_parsed(messages), tools), add_special_tokens=False))


def _parsed(messages: list[Json]) -> list[Json]:
    result = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        result.append(message)
    return result


Servers = Callable[..., Live]
