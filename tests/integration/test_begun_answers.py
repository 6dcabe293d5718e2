"""A last message of the assistant is the beginning of the answer, in every dialect, and nothing is computed twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.live import Live
from tests.kinds import some
from tests.oracle import script

ASKED = "Say what stands in this file: " + "def f(): return 1 " * 60
BEGUN, REST = "The file holds:", "\n  - one function, and no more than that."
ALONE: list[dict[str, Any]] = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": BEGUN}]
# Where it is asked, the words of a whole answer, and those of an event of a stream.
DIALECTS: dict[str, tuple[str, Callable[[Any], str], Callable[[Any], str]]] = {
    "chat": (
        "/v1/chat/completions",
        lambda data: data["choices"][0]["message"]["content"],
        lambda event: "".join(choice["delta"].get("content") or "" for choice in event["choices"]),
    ),
    "messages": (
        "/v1/messages",
        lambda data: "".join(block.get("text", "") for block in data["content"]),
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
    ),
    "responses": (
        "/v1/responses",
        lambda data: "".join(part["text"] for item in data["output"] for part in item.get("content", [])),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "ollama": (
        "/api/chat",
        lambda data: data["message"]["content"],
        lambda event: event.get("message", {}).get("content", ""),
    ),
}


def said(dialect: str, text: str, stream: bool) -> tuple[str, dict[str, Any]]:
    """The answer's words, and the report."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    usages = [event.get("response", event).get("usage") or event for event in events]
    reports = [usage["start_llm"] for usage in usages if usage.get("start_llm")]
    return "".join(map(DIALECTS[dialect][1 + stream], events)), reports[-1]


def body_of(dialect: str, messages: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    if dialect == "responses":
        return {"input": messages, "max_output_tokens": 60, "stream": stream}
    most = {"options": {"num_predict": 60}} if dialect == "ollama" else {"max_tokens": 60}
    told = {"stream_options": {"include_usage": True}} if dialect == "chat" and stream else {}
    return {"model": "default", "messages": messages, "stream": stream, "think": False, **most, **told}


@pytest.mark.parametrize("stream", some([True, False]), ids=["streamed", "whole"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_the_answer_goes_on_and_so_does_the_next_turn(
    servers: Callable[..., Live], kind: str, dialect: str, stream: bool
) -> None:
    server, path = servers(kind), DIALECTS[dialect][0]
    asked = [{"role": "user", "content": f"{ASKED} {dialect} {stream} {script(BEGUN + REST)}"}]
    begun = [*asked, {"role": "assistant", "content": BEGUN}]
    words, _ = said(dialect, server.post(path, json=body_of(dialect, begun, stream)).text, stream)
    prompt = list(server.prompts.values())[-1]
    assert words == REST
    history = [*asked, {"role": "assistant", "content": BEGUN + words}, {"role": "user", "content": "And then?"}]
    _, report = said(dialect, server.post(path, json=body_of(dialect, history, stream)).text, stream)
    assert report["computed"] <= report["new"] + 2 and report["reused"] >= len(prompt), report


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"response_format": {"type": "json_object"}}, "response format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "must be a call"),
        ({"messages": [{"role": "assistant", "content": BEGUN}]}, "no other message"),
        ({"messages": [*ALONE[:1], ALONE[1] | {"reasoning_content": "Well."}]}, "reasoning of its own"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_its_place(
    servers: Callable[..., Live], more: dict[str, Any], why: str
) -> None:
    answer = servers("plain").post("/v1/chat/completions", json={"model": "default", "messages": ALONE} | more)
    error = answer.json()["error"]
    assert answer.status_code == 400 and why in error["message"] and error["param"].startswith("messages[")
