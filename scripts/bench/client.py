"""One chat completion over HTTP, streamed, as agents ask for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]


@dataclass
class Call:
    """A tool call as the server told it; `arguments` is JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Reply:
    """What came back.

    Attributes:
        seconds_to_first: seconds from sending to the first reasoning, text or call; to the end if there was none.
        report: what start_llm says of its cache (``usage.start_llm``); ``None`` for other servers.
        error: what went wrong; the other fields then hold what had come before.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    seconds_to_first: float = 0.0
    seconds: float = 0.0
    usage: Json = field(default_factory=dict)
    report: Json | None = None
    error: str | None = None


def _events(response: httpx.Response) -> Iterator[Json]:
    for line in response.iter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)


def _add_calls(reply: Reply, deltas: list[Json]) -> None:
    for delta in deltas:
        index = delta.get("index", len(reply.calls))
        while len(reply.calls) <= index:
            reply.calls.append(Call())
        call, function = reply.calls[index], delta.get("function") or {}
        call.id = delta.get("id") or call.id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _add(reply: Reply, event: Json) -> bool:
    """Takes one chunk in; true if it held something of the answer."""
    if "error" in event:
        reply.error = json.dumps(event["error"])
    if usage := event.get("usage"):
        reply.usage = usage
        reply.report = usage.get("start_llm", reply.report)
    came = False
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content, calls = delta.get("content") or "", delta.get("tool_calls") or []
        reply.reasoning += reasoning
        reply.content += content
        _add_calls(reply, calls)
        reply.finish = choice.get("finish_reason") or reply.finish
        came = came or bool(reasoning or content or calls)
    return came


class Client:
    """Asks one server. Thread-safe: every request has its own connection, as agents' often have."""

    def __init__(self, url: str, model: str, key: str | None = "none", timeout: float = 600.0) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.timeout = timeout

    def ask(self, body: Json) -> Reply:
        """Sends `body` (messages, tools, ...)."""
        body = {**body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        reply, started, first = Reply(), time.perf_counter(), False
        try:
            with (
                httpx.Client(timeout=self.timeout, headers=self.headers) as http,
                http.stream("POST", f"{self.base}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    reply.error = f"{response.status_code}: {response.read().decode(errors='replace')[:500]}"
                for event in _events(response) if reply.error is None else ():
                    if _add(reply, event) and not first:
                        first = True
                        reply.seconds_to_first = time.perf_counter() - started
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.seconds = time.perf_counter() - started
        if not first:
            reply.seconds_to_first = reply.seconds
        return reply

    def ask_messages(self, body: Json) -> Reply:
        """Sends `body` to Anthropic's API, and takes the answer whole."""
        reply, started = Reply(), time.perf_counter()
        body = {**body, "model": self.model, "stream": False}
        try:
            url = f"{self.base}/v1/messages"
            response = httpx.post(url, json=body, headers=self.headers, timeout=self.timeout)
            answer = response.json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        reply.seconds = reply.seconds_to_first = time.perf_counter() - started
        if "error" in answer:
            reply.error = json.dumps(answer["error"])
        for block in answer.get("content", ()):
            reply.content += block.get("text", "")
            reply.reasoning += block.get("thinking", "")
            if block["type"] == "tool_use":
                reply.calls.append(Call(block["id"], block["name"], json.dumps(block["input"])))
        reply.usage = answer.get("usage", {})
        reply.report = reply.usage.get("start_llm")
        return reply

    def get(self, path: str) -> httpx.Response:
        """Raises httpx.HTTPError."""
        return httpx.get(self.base + path, timeout=30.0, headers=self.headers)
