"""The machine's clock is set forward and back while the server runs: waits, limits and ages do not follow it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from tests.integration.live import Start

DAY = 86_400.0


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_jumps_neither_end_a_request_nor_evict_its_kv(start: Start, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    real = time.time
    jumps = itertools.cycle((3 * DAY, -9 * DAY, DAY, 0.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    settings = {"kv_disk_dir": "auto", "prompt_cache_ttl_seconds": 600, "generation_watchdog_seconds": 60}
    with start(kind, **settings) as server:
        messages: list[dict[str, Any]] = []
        for text in ("word " * 300, "again ", "again "):
            report = server.turn(messages, text)
        assert report["computed"] <= report["new"] + 16
        server.app.engine.call(lambda scheduler: scheduler.store.idle())
        assert server.app.engine.call(lambda scheduler: scheduler.figures()["kv_evicted"]) == 0
