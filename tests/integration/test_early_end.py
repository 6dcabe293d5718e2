"""A request that ends early costs what was computed, not what was planned; a first token is the first one."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import httpx
import pytest

from start_llm.core.errors import Internal
from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries
from start_llm.engine.schedule.prefill import Prompts
from start_llm.engine.thread import EngineThread
from tests.integration.live import WAIT, Start, send_raw
from tests.waiting import until

CHUNK = 512
MESSAGES = [{"role": "user", "content": "word " * 5000 + "[[truth]]"}]


@pytest.mark.parametrize("end", ["gone", "failed"])
def test_one_chunk_of_5000_tokens_is_told_as_one(start: Start, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    computed, cancelled, end_of_fault = threading.Event(), threading.Event(), threading.Event()
    compute, cancel = Prompts.compute, EngineThread.cancel

    def one_chunk(self: Prompts, job: Any, step: int) -> int:
        """After the first chunk nothing goes on before the client has gone."""
        if computed.is_set() and end == "failed" and not end_of_fault.is_set():
            raise Internal("The model broke.")
        done = compute(self, job, step)
        if not computed.is_set():
            computed.set()
            assert end == "failed" or cancelled.wait(WAIT)
            time.sleep(1.0)  # a chunk may take so long: its tokens are told, too
        return done

    def seen(self: EngineThread, work_id: str) -> None:
        cancel(self, work_id)
        cancelled.set()

    with start(prefill_step_size=CHUNK) as server:
        monkeypatch.setattr(Prompts, "compute", one_chunk)
        monkeypatch.setattr(EngineThread, "cancel", seen)
        with send_raw(server.url, MESSAGES, stream=True) as connection:
            assert computed.wait(WAIT)
            if end == "failed":
                while connection.recv(65536):
                    pass
        requests = f"{server.url}/v1/cache/requests"
        entry = until(lambda: httpx.get(requests).json()["requests"])[0]
        one = httpx.get(f"{requests}/{entry['id']}").json()
        counted = server.figure('tokens_total{kind="computed"}')
        with httpx.stream("GET", f"{server.url}/page/feed") as feed:
            line = next(line for line in feed.iter_lines() if line.startswith("data: "))
        (page,) = json.loads(line.removeprefix("data: "))["ended"]
        end_of_fault.set()
        again = server.chat(MESSAGES)["report"]
    row, _ = entries(server.cache / AUDIT_FILE, Wanted(), 10)
    (log,) = (server.cache / "logs").rglob("session-*.jsonl")
    logged = json.loads(log.read_text().splitlines()[0])
    assert row.outcome == end and row.prompt > 5000
    assert [row.computed, entry["computed"], one["computed"], page["computed"], logged["computed"]] == [CHUNK] * 5
    assert counted == CHUNK
    assert again["new"] == row.prompt - CHUNK, again
    if end == "gone":  # what a fault has touched is not kept
        assert again["computed"] == again["new"] and "miss" not in again
    assert entry["new"] == CHUNK, "what it did not come to is new when it is sent again"


@pytest.mark.parametrize("rounds", [8, pytest.param(60, marks=pytest.mark.thorough)])
def test_what_a_cancelled_request_is_told_to_have_computed_was_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Clients leave at moments by chance, while passes are slow; some come back with the same request."""
    chance = random.Random(7)
    with start(prefill_step_size=64) as server:
        requests = f"{server.url}/v1/cache/requests"
        monkeypatch.setenv("ORACLE_SLEEP_PER_TOKEN", "0.0002")
        for number in range(rounds):
            passes = server.passes()
            messages = [{"role": "user", "content": f"{number // 2} " + "word " * 500 + "[[truth]]"}]
            with send_raw(server.url, messages, stream=True):
                until(lambda count=number + 1: len(server.prompts) == count)
                time.sleep(chance.uniform(0, 0.12))
            ended = until(
                lambda: [e for e in httpx.get(requests).json()["requests"] if e["id"] == [*server.prompts][-1]]
            )
            done = server.prompt_work(ended[0]["prompt"], passes)
            assert ended[0]["computed"] == done, (number, ended[0])
            assert "miss" not in ended[0], ended[0]


def test_the_first_token_of_an_answer_that_is_sent_as_a_whole_is_its_first_token(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer goes on until its first token cannot be taken for its end; the live line says answering."""
    with start(drafts="off", sse_ping_seconds=0.05) as server:
        monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.5")
        began, seen = time.monotonic(), 0.0
        states: set[str] = set()
        asked = [{"role": "user", "content": "Hello. [[truth]]"}]
        answered = threading.Thread(target=lambda: server.chat(asked))
        answered.start()
        with httpx.stream("GET", f"{server.url}/page/feed") as feed:
            for line in feed.iter_lines():
                if not line.startswith("data: "):
                    continue
                told = json.loads(line.removeprefix("data: "))
                states.update(run["state"] for run in told["now"])
                seconds = time.monotonic() - began
                if "answer" in states:
                    seen = seen or seconds
                    if seconds > 2 * seen:
                        monkeypatch.delenv("ORACLE_SLEEP_PER_STEP", raising=False)
                if told["ended"]:
                    break
        answered.join()
        entry = told["ended"][0]
    assert "answer" in states
    assert entry["seconds_first"] < entry["seconds"] / 2
