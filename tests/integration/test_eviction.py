"""Side requests and sub-agents do not push out the main conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.integration.live import TOOLS, Live, Start, echoed
from tests.together import together
from tests.waiting import until


def words(tag: str, tokens: int) -> str:
    return f"{tag} " * (tokens // 2)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "hybrid"])
@pytest.mark.parametrize(
    ("tokens", "side_requests", "sub_agents"), [(4_000, 40, 6), pytest.param(8_000, 200, 12, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_a_session_survives_side_requests_and_sub_agents(
    start: Start, kind: str, tokens: int, side_requests: int, sub_agents: int
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": words("system", 1000)}]
    with start(kind) as server:
        server.turn(list(messages), words("code", tokens - 2000), tools=TOOLS)
        used = server.app.engine.call(lambda scheduler: scheduler.figures()["kv_bytes"])
    with start(kind, cache_memory_bytes=int(3 * used)) as server:
        first = server.turn(messages, words("code", tokens - 2000), tools=TOOLS)
        for i in range(side_requests):
            server.chat([{"role": "user", "content": f"title {i} {words('side', 300)}"}])
        together(partial(sub_agent, server, i) for i in range(sub_agents))
        assert server.app.engine.call(lambda scheduler: scheduler.figures()["kv_evicted"]) >= side_requests
        before = server.work()
        last = server.turn(messages, words("next", 100), tools=TOOLS)
        assert server.work() - before <= 1.2 * (last["prompt"] - first["prompt"] - first["generated"])


def test_unused_kv_leaves_memory_while_nobody_asks(start: Start) -> None:
    with start(prompt_cache_ttl_seconds=1) as server:
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
