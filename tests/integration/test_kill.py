"""``kill -9``, start again: the next turn costs what is new in it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.processes import WAIT, process, until
from tests.oracle import mark, work_done

TURNS, TURN_TOKENS = 5, 4000


def figure(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=5).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"start_llm_{name} "))


def turn(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "default", "messages": messages}
    data: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT).json()
    messages.append({"role": "assistant", "content": data["choices"][0]["message"]["content"]})
    usage: dict[str, Any] = data["usage"]
    return usage


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_conversation_of_20_000_tokens_goes_on_after_a_kill(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    log, messages = tmp_path / "work.jsonl", []
    messages.append({"role": "system", "content": "You are careful."})
    with process(oracle_path(kind), tmp_path, ORACLE_LOG=str(log)) as (url, child):
        for i in range(TURNS):
            messages.append({"role": "user", "content": f"part {i}: " + "word " * (TURN_TOKENS // 2)})
            usage = turn(url, messages)
        known = usage["total_tokens"]
        assert known >= 20_000
        until(lambda: figure(url, "kv_disk_waiting_bytes") == 0 and figure(url, "kv_disk_waiting_segments") == 0)
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)
    since = mark(log)
    with process(oracle_path(kind), tmp_path, ORACLE_LOG=str(log)) as (url, _):
        messages.append({"role": "user", "content": "and now " * 100})
        usage = turn(url, messages)
    assert work_done(log, since) <= 1.1 * (usage["prompt_tokens"] - known), json.dumps(usage)
