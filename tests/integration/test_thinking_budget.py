"""A thinking budget closes the reasoning; what follows is the answer."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.live import Live
from tests.oracle import script

THOUGHT = " ".join(f"thought number {i}" for i in range(60))


def ask(server: Live, **thinking: object) -> list[dict[str, str]]:
    body = {
        "model": "claude-local",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": script(f"<think>\n{THOUGHT}\n</think>\n\nSo it is.")}],
        **thinking,
    }
    answer = server.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    blocks: list[dict[str, str]] = answer.json()["content"]
    return blocks


def test_reasoning_ends_with_its_budget(servers: Callable[..., Live]) -> None:
    server = servers("plain")
    free = ask(server, thinking={"type": "adaptive"})
    assert free[0]["thinking"].strip() == THOUGHT
    cut = ask(server, thinking={"type": "enabled", "budget_tokens": 20})
    assert cut[0]["type"] == "thinking"
    assert THOUGHT.startswith(cut[0]["thinking"].strip())
    assert 0 < len(cut[0]["thinking"]) < len(THOUGHT) / 4
