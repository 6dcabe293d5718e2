"""Long prefills: health answers, clients that go away free the model, nothing computed is lost, retries join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.live import Live, live, send_raw
from tests.waiting import until

pytestmark = pytest.mark.thorough

CHUNK = 128
PER_TOKEN = "ORACLE_SLEEP_PER_TOKEN"
SLOW, SLOWER = "0.0005", "0.01"  # seconds; all else happens in the middle of a prefill that takes 100 s
TOKENS = 10_000
MESSAGES = [{"role": "user", "content": "word " * (TOKENS // 2) + "[[truth]]"}]


@pytest.fixture
def slow(oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv(PER_TOKEN, SLOW)
    with live(oracle_path("plain"), tmp_path, prefill_step_size=CHUNK, sse_ping_seconds=0.2) as server:
        yield server


def test_health_answers_during_a_prefill(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PER_TOKEN, SLOWER)
    thread = threading.Thread(target=lambda: slow.chat(MESSAGES))
    thread.start()
    until(lambda: slow.work() > 0 and slow.app.service.health().running == 1)
    answers = [slow.get("/health").json() for _ in range(2)]
    monkeypatch.setenv(PER_TOKEN, "0")
    thread.join()
    assert {a["state"] for a in answers} == {"busy"}
    assert answers[0]["running"] == 1


def test_a_client_that_goes_away_frees_the_model_and_its_prefill_is_kept(
    slow: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with send_raw(slow, MESSAGES):
        until(lambda: slow.work() >= 2000)
        monkeypatch.setenv(PER_TOKEN, SLOWER)
    until(lambda: slow.app.service.health().running == 0)
    monkeypatch.setenv(PER_TOKEN, "0")
    done = slow.work()
    assert done < 0.9 * TOKENS
    answer = slow.chat(MESSAGES)
    prompt = len(slow.prompt_of(answer))
    assert slow.work() <= prompt + CHUNK
    assert answer["report"]["reused"] >= done - CHUNK


def test_a_retry_joins_the_running_prefill(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: results.append(slow.chat(MESSAGES))) for _ in range(2)]
    threads[0].start()
    until(lambda: slow.work() >= 1000)
    monkeypatch.setenv(PER_TOKEN, SLOWER)
    threads[1].start()
    until(lambda: len(slow.prompts) == 2)
    monkeypatch.setenv(PER_TOKEN, "0")
    for thread in threads:
        thread.join()
    assert results[0]["message"]["content"] == results[1]["message"]["content"]
    assert slow.work() <= len(slow.prompt_of(results[0])) + CHUNK
    assert max(r["report"]["joined"] for r in results) > TOKENS / 2


def test_a_stream_shows_life(slow: Live) -> None:
    body = {"model": "default", "messages": MESSAGES, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    pings = [line for line in lines if line.startswith(":")]
    assert len(pings) >= 3
    assert lines[-1] == "data: [DONE]"
