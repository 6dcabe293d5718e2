"""``kill -9``, start again: the next turn costs what is new in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.kill_server import figures
from tests.integration.live import live
from tests.integration.processes import WAIT, process
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TURNS = 5


def is_written(url: str, tokens: int) -> bool:
    """The figures are told together, about once a second: they count if they know of the last answer."""
    told, names = figures(url), ("tokens", "disk_waiting_bytes", "disk_waiting_segments")
    stored, *waiting = (told[f"start_llm_kv_{name}"] for name in names)
    return stored >= tokens - 8 and not any(waiting)


def turn(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "default", "messages": messages}
    data: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT).json()
    messages.append({"role": "assistant", "content": data["choices"][0]["message"]["content"]})
    usage: dict[str, Any] = data["usage"]
    return usage


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "hybrid"])
@pytest.mark.parametrize("tokens", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_conversation_goes_on_after_a_kill(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str, tokens: int
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are careful."}]
    with process(oracle_path(kind), tmp_path) as (url, child):
        for i in range(TURNS):
            messages.append({"role": "user", "content": f"part {i}: " + "word " * (tokens // TURNS // 2)})
            usage = turn(url, messages)
        known = usage["total_tokens"]
        assert known >= tokens
        until(lambda: is_written(url, known))
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)
    with live(oracle_path(kind), tmp_path, kv_disk_dir="auto") as server:
        messages.append({"role": "user", "content": "and now " * 100})
        usage = turn(server.url, messages)
        assert server.work() <= 1.1 * (usage["prompt_tokens"] - known), json.dumps(usage)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kills_during_writes(oracle_path: Callable[..., Path], tmp_path: Path, kind: str, kills: int) -> None:
    """The next start serves, no file is damaged, every answer is right."""
    program = str(Path(__file__).with_name("kill_server.py"))
    command = [sys.executable, program, str(oracle_path(kind)), str(tmp_path), str(kills), "1"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{kills} kills, {2 * kills} answers right" in done.stdout
