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
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}),
    "messages": ("/v1/messages", {}),
    "responses": ("/v1/responses", {}),
    "ollama": ("/api/chat", {}),
}


def body_of(dialect: str, messages: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    if dialect == "responses":
        return {"input": messages, "max_output_tokens": 60, "stream": stream}
    most = {"options": {"num_predict": 60}} if dialect == "ollama" else {"max_tokens": 60}
    told = {"stream_options": {"include_usage": True}} if dialect == "chat" and stream else {}
    return {"model": "default", "messages": messages, "stream": stream, "think": False, **most, **told}


def said(dialect: str, text: str, stream: bool) -> tuple[str, dict[str, Any]]:
    """The answer's words, and the report."""
    if not stream:
        data = json.loads(text)
        parts = {
            "chat": lambda: data["choices"][0]["message"]["content"],
            "messages": lambda: "".join(block.get("text", "") for block in data["content"]),
            "responses": lambda: "".join(p["text"] for item in data["output"] for p in item.get("content", [])),
            "ollama": lambda: data["message"]["content"],
        }
        return parts[dialect](), data["start_llm"] if dialect == "ollama" else data["usage"]["start_llm"]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    words, report = "", {}
    for event in events:
        if dialect == "chat" and event["choices"]:
            words += event["choices"][0]["delta"].get("content") or ""
        if dialect == "messages" and event["type"] == "content_block_delta":
            words += event["delta"].get("text", "")
        if dialect == "responses" and event["type"] == "response.output_text.delta":
            words += event["delta"]
        if dialect == "ollama":
            words += event.get("message", {}).get("content", "")
        usage = event.get("response", event).get("usage") or event
        report = usage.get("start_llm") or report
    return words, report


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
