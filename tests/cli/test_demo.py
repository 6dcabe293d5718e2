from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.lazy import Package
from tests.vendors import openai

demo: Any = Package("start_llm.cli.demo")  # it imports openai


def chunk(delta: dict[str, Any] | None = None, usage: dict[str, Any] | None = None) -> str:
    body = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "m",
        "choices": [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}],
        "usage": usage,
    }
    return f"data: {json.dumps(body)}\n\n"


def call(index: int, **function: str) -> dict[str, Any]:
    return {"index": index, "id": f"call_{index}" if "name" in function else None, "function": function}


class Backend:
    """Answers the n-th request with the n-th list of chunks; keeps the bodies."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.bodies = list(answers), list[dict[str, Any]]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        text = "".join(self.answers.pop(0)) + "data: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)

    def client(self) -> openai.OpenAI:
        http = httpx.Client(transport=httpx.MockTransport(self))
        return openai.OpenAI(base_url="http://test/v1", api_key="x", http_client=http)


def usage(prompt: int, generated: int, **own: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated, **own}


def test_a_conversation_resends_everything_and_answers_calls() -> None:
    backend = Backend(
        [
            chunk({"role": "assistant", "reasoning_content": "hm"}),
            chunk({"content": "I "}),
            chunk({"content": "look."}),
            chunk({"tool_calls": [call(0, name="read_file", arguments='{"pa')]}),
            chunk({"tool_calls": [call(0, arguments='th": "a"}')]}),
            chunk({"tool_calls": [call(1, name="run_shell", arguments="{}")]}),
            chunk(usage=usage(100, 20, start_llm={"reused": 0, "computed": 100})),
        ],
        [chunk({"content": "b"}), chunk(usage=usage(150, 5, prompt_tokens_details={"cached_tokens": 118}))],
        [chunk({"content": "c"}), chunk(usage=usage(170, 5))],
    )
    with backend.client() as client:
        turns = demo.converse(client, "m")
    assert [(t.prompt, t.resent, t.reused, t.computed) for t in turns] == [
        (100, 0, 0, 100),
        (150, 120, 118, 32),
        (170, 155, 0, 170),
    ]
    assert [t.share >= demo.ENOUGH for t in turns] == [True, True, False]
    assert all(t.first_token > 0 for t in turns)
    first, second, third = (body["messages"] for body in backend.bodies)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assistant = second[len(first)]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == ['{"path": "a"}', "{}"]
    answered = [m["tool_call_id"] for m in second if m["role"] == "tool"]
    assert answered == ["call_0", "call_1"]
    assert [m["content"] for m in third if m["role"] == "user"] == list(demo.TURNS)


def test_the_table_has_a_row_for_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        demo.DemoTurn(prompt=1000, computed=1000, first_token=1.5),
        demo.DemoTurn(prompt=1200, reused=990, resent=1000, computed=210),
    ]
    Console(width=100).print(demo.table(turns))
    said = capsys.readouterr().out
    assert "1,000" in said
    assert "990 (99%)" in said
    assert "1.50 s" in said
