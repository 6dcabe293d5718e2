"""Side requests and sub-agents do not push out the main conversation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import TOOLS, Live, echoed, live
from tests.oracle import expected_truth
from tests.waiting import until


def words(tag: str, tokens: int) -> str:
    return f"{tag} " * (tokens // 2)


def main_turn(server: Live, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """(prompt tokens, tokens known after the answer); the answer is appended."""
    answer = server.chat(messages, tools=TOOLS)
    prompt = server.prompt_of(answer)
    assert answer["message"]["content"] == expected_truth(prompt)
    messages.append(echoed(answer["message"], "keep"))
    return len(prompt), len(prompt) + answer["report"]["generated"]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "hybrid"])
@pytest.mark.parametrize(
    ("tokens", "side_requests", "sub_agents"), [(4_000, 40, 6), pytest.param(8_000, 200, 12, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_a_session_survives_side_requests_and_sub_agents(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str, tokens: int, side_requests: int, sub_agents: int
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words("system", 1000)},
        {"role": "user", "content": words("code", tokens - 2000) + "[[truth]]"},
    ]
    with live(oracle_path(kind), tmp_path) as server:
        main_turn(server, list(messages))
        used = server.app.engine.call(lambda scheduler: scheduler.figures()["kv_bytes"])
    with live(oracle_path(kind), tmp_path, cache_memory_bytes=int(3 * used)) as server:
        _, known = main_turn(server, messages)
        for i in range(side_requests):
            server.chat([{"role": "user", "content": f"title {i} {words('side', 300)}"}])
        threads = [threading.Thread(target=sub_agent, args=(server, i)) for i in range(sub_agents)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.app.engine.call(lambda scheduler: scheduler.figures()["kv_evicted"]) >= side_requests
        messages.append({"role": "user", "content": words("next", 100) + "[[truth]]"})
        before = server.work()
        prompt, _ = main_turn(server, messages)
        assert server.work() - before <= 1.2 * (prompt - known)


def test_unused_kv_leaves_memory_while_nobody_asks(oracle_path: Callable[..., Path], tmp_path: Path) -> None:
    with live(oracle_path("plain"), tmp_path, prompt_cache_ttl_seconds=1) as server:
        server.chat([{"role": "user", "content": "[[truth]]"}])
        until(lambda: server.app.engine.status().figures["kv_evicted"] > 0)
        until(lambda: server.app.engine.status().figures["kv_bytes"] == 0)


def sub_agent(server: Live, number: int) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words("system", 1000)},
        {"role": "user", "content": f"sub-agent {number}: {words('task', 800)}"},
    ]
    for turn in range(3):
        answer = server.chat(messages, tools=TOOLS)
        messages.append(echoed(answer["message"], "keep"))
        messages.append({"role": "user", "content": f"step {turn} {words('step', 200)}"})
