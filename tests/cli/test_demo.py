from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console

from start_llm.cli import demo
from start_llm.cli.measure import Timed
from start_llm.clients.agent import Endpoint
from start_llm.launch import chat


def chunk(delta: dict[str, Any] | None = None, usage: dict[str, Any] | None = None) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n"


def usage(prompt: int, generated: int, **own: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, **own}


@contextmanager
def backend(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Answers the n-th request with the n-th list of chunks; gives the bodies."""
    left, bodies = list(answers), list[dict[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="".join(left.pop(0)) + "data: [DONE]\n\n")

    own = httpx.Client
    monkeypatch.setattr(chat.httpx, "Client", lambda **_: own(transport=httpx.MockTransport(answer)))
    yield bodies


def test_a_conversation_resends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(url="http://test", key="x", model="m", context=4096, answer=demo.MAX_TOKENS)
    with backend(
        monkeypatch,
        [
            chunk({"role": "assistant", "reasoning_content": "hm"}),
            chunk({"content": "I "}),
            chunk({"content": "look."}),
            chunk(usage=usage(100, 20, start_llm={"reused": 0, "computed": 100})),
        ],
        [chunk({"content": "b"}), chunk(usage=usage(150, 5, prompt_tokens_details={"cached_tokens": 118}))],
        [chunk({"content": "c"}), chunk(usage=usage(170, 5))],
    ) as bodies:
        turns = demo.converse(endpoint)
    assert [(t.found.prompt, t.resent, t.reused, t.found.computed) for t in turns] == [
        (100, 0, 0, 100),
        (150, 120, 118, 32),
        (170, 155, 0, 170),
    ]
    assert [t.share >= demo.ENOUGH for t in turns] == [True, True, False]
    assert all(t.found.first > 0 for t in turns)
    assert all(body["tools"] and body["temperature"] == 0 and body["max_tokens"] == demo.MAX_TOKENS for body in bodies)
    first, second, third = (body["messages"] for body in bodies)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert second[len(first)] == {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert [m["content"] for m in third if m["role"] == "user"] == list(demo.TURNS)


def test_the_table_has_a_row_for_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        demo.DemoTurn(Timed(prompt=1000, computed=1000, generated=1, first=1.5, seconds=2, text=""), resent=0),
        demo.DemoTurn(Timed(prompt=1200, computed=210, generated=1, first=0.5, seconds=2, text=""), resent=1000),
    ]
    Console(width=100).print(demo.table(turns))
    said = capsys.readouterr().out
    assert "1,000" in said
    assert "990 (99%)" in said
    assert "1.50 s" in said
