"""What takes too long ends and says so; what makes progress may take its time, and whoever asks again joins it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.live import Start
from tests.waiting import until

pytestmark = pytest.mark.thorough

CHUNK = 128
PER_TOKEN = "ORACLE_SLEEP_PER_TOKEN"


def test_an_answer_that_takes_too_long_is_cut_and_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    with start(generation_watchdog_seconds=4, drafts="off") as server:
        answer = server.chat([{"role": "user", "content": "[[long 1000]]"}], max_tokens=2000)
        assert answer["body"]["choices"][0]["finish_reason"] == "length"
        assert 1 <= answer["body"]["usage"]["completion_tokens"] < 100
        assert answer["message"]["content"] and answer["report"]["cut"] == "watchdog"

        think = {"role": "user", "content": "[[script]]<think>\n" + "hm " * 500 + "\n</think>\nDone[[end]]"}
        body = {"model": "default", "messages": [think], "max_tokens": 2000}
        nothing = server.post("/v1/chat/completions", json=body)
        assert nothing.status_code == 504 and nothing.json()["error"]["code"] == "watchdog", nothing.text

        monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
        whole = server.chat([{"role": "user", "content": "[[long 3]]"}])
        assert whole["body"]["usage"]["completion_tokens"] >= 3 and "cut" not in whole["report"]


def test_a_prompt_that_makes_progress_takes_as_long_as_it_takes_and_shows_life(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PER_TOKEN, "0.002")
    asked = [{"role": "user", "content": "word " * 2000 + "[[long 3]]"}]
    body = {"model": "default", "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
    with start(generation_watchdog_seconds=2, prefill_step_size=64, sse_ping_seconds=0.2) as server:
        lines = server.post("/v1/chat/completions", json=body).text.splitlines()
    assert sum(line.startswith(":") for line in lines) >= 3
    *events, end = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    usage = json.loads(events[-1])["usage"]
    assert end == "[DONE]" and usage["start_llm"]["seconds_prefill"] > 3 and usage["completion_tokens"] >= 3


def test_a_retry_joins_the_running_prefill(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PER_TOKEN, "0.0005")
    asked = [{"role": "user", "content": "word " * 5000 + "[[truth]]"}]
    with start(prefill_step_size=CHUNK) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.chat, asked)
        until(lambda: server.work() >= 1000)
        monkeypatch.setenv(PER_TOKEN, "0.01")  # the second one comes in the middle of a prefill that takes 100 s
        second = pool.submit(server.chat, asked)
        until(lambda: len(server.prompts) == 2)
        monkeypatch.setenv(PER_TOKEN, "0")
        one, other = first.result(), second.result()
        assert one["message"]["content"] == other["message"]["content"]
        prompt = len(server.prompt_of(one))
        assert server.work() <= prompt + CHUNK
        assert max(each["report"]["joined"] for each in (one, other)) > prompt / 2
