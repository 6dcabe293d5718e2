"""What takes too long ends and says so; what makes progress may take its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.live import live

pytestmark = pytest.mark.thorough


def test_an_answer_that_takes_too_long_is_cut_and_says_so(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    with live(oracle_path("plain"), tmp_path, generation_watchdog_seconds=4, drafts="off") as server:
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


def test_a_prompt_that_makes_progress_takes_as_long_as_it_takes(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(oracle_path("plain"), tmp_path, generation_watchdog_seconds=2, prefill_step_size=64) as server:
        monkeypatch.setenv("ORACLE_SLEEP_PER_TOKEN", "0.002")
        answer = server.chat([{"role": "user", "content": "word " * 2000 + "[[long 3]]"}], max_tokens=50)
        assert answer["report"]["seconds_prefill"] > 3
        assert answer["body"]["choices"][0]["finish_reason"] == "stop"
