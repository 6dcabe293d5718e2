"""A request that takes too long ends with what there is; its turn is not recorded, its client is not left waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.live import live


def test_the_deadline_ends_an_answer_with_length(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_SLEEP_PER_STEP", "0.05")
    with live(oracle_path("plain"), tmp_path, generation_watchdog_seconds=1.0) as server:
        answer = server.chat([{"role": "user", "content": "[[long 1000]]"}], max_tokens=2000)
        assert answer["body"]["choices"][0]["finish_reason"] == "length"
        assert 1 <= answer["body"]["usage"]["completion_tokens"] < 100
        monkeypatch.delenv("ORACLE_SLEEP_PER_STEP")
        assert server.chat([{"role": "user", "content": "[[long 3]]"}])["body"]["usage"]["completion_tokens"] >= 3
