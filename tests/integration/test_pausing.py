"""Memory for two long answers and four clients: all get what they get alone, and those that wait see life."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.live import Live, Start
from tests.waiting import until

CLIENTS = 4
WORDS = 160  # tokens of an answer, and a few more
PING_SECONDS = 0.05


def ask(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"request {number} [[truth]] [[long {WORDS}]]"}]


def stream(server: Live, number: int, out: dict[int, Any]) -> None:
    """The whole answer, and the signs of life behind its first words."""
    body = {"model": "default", "messages": ask(number), "stream": True, "temperature": 0.7, "seed": number}
    text, pings = "", 0
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=100) as response:
        status = response.status_code
        for line in response.iter_lines():
            pings += line.startswith(":") and bool(text)
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"]
    out[number] = (status, text, finish, pings)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "hybrid"])
@pytest.mark.thorough
def test_four_answers_where_two_fit(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("start_llm.engine.schedule.preemption.TYPICAL_ANSWER", 64)
    monkeypatch.setattr("start_llm.engine.schedule.preemption.GROWTH", 32)
    alone: dict[int, Any] = {}
    with start(kind, tmp_path / "alone") as server:
        for number in range(CLIENTS):
            stream(server, number, alone)
        row = server.app.engine.call(lambda scheduler: scheduler.store.estimate(WORDS + 160))
    monkeypatch.setattr("start_llm.engine.schedule.memory.kv_bytes", lambda usable, weights: int(2.5 * row))
    together: dict[int, Any] = {}
    fault = tmp_path / "fault"
    monkeypatch.setenv("ORACLE_FAULT", str(fault))
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.005")  # on a quick machine a pause takes as long
    with start(kind, tmp_path / "together", sse_ping_seconds=PING_SECONDS) as server:
        fault.write_text("hang")  # until all have come
        clients = [threading.Thread(target=stream, args=(server, n, together)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        until(lambda: len(server.prompts) == CLIENTS)
        fault.unlink()
        for client in clients:
            client.join()
        assert server.app.engine.call(lambda scheduler: scheduler.figures()["requests_paused"]) >= 1
        assert server.app.engine.call(lambda scheduler: scheduler.figures()["kv_errors"]) == 0
    for number in range(CLIENTS):
        status, text, finish, _ = together[number]
        assert (status, text, finish) == alone[number][:3]
        assert (status, finish) == (200, "stop") and len(text) > WORDS
    assert max(pings for *_, pings in together.values()) > 2


def test_without_a_limit_an_answer_may_be_as_long_as_the_context(start: Start) -> None:
    asked: list[int] = []
    long = [{"role": "user", "content": "[[long 1000]]"}]
    for settings in ({}, {"default_max_tokens": 7}):
        with start(max_kv_size=256, **settings) as server, server.submitted() as works:
            answer = server.chat(long)
            assert answer["body"]["choices"][0]["finish_reason"] == "length"
            server.chat(long, max_tokens=5)
            left = 256 - len(server.prompt_of(answer))
        asked += [work.max_tokens for work in works]
    assert asked == [left, 5, 7, 5]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory has room for at the start is the model's context; 507 is for what is short of it later."""
    room = [50_000]
    monkeypatch.setattr("start_llm.engine.schedule.memory.kv_bytes", lambda usable, weights: room[0])
    with start() as server:

        def answer(words: int) -> httpx.Response:
            body = {"model": "default", "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 8}
            return server.post("/v1/chat/completions", json=body)

        refused = answer(2000)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
        assert str(server.app.service.models.cards()[0].context) in error["message"].replace(",", "")
        assert answer(400).status_code == 200
        room[0] = 2_000
        refused = answer(400)
        assert refused.status_code == 507 and "Shorten the conversation" in refused.json()["error"]["message"]
        assert answer(4).status_code == 200
