"""``kill -9``, start again: the next turn costs what is new in it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.oracle import mark, work_done

ROOT = Path(__file__).resolve().parents[2]
WAIT = 90.0
TURNS, TURN_TOKENS = 5, 4000


@contextmanager
def process(model: Path, folder: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MODEL_PATH": str(model),
        "TRUST_REMOTE_CODE": "true",
        "START_LLM_CACHE_DIR": str(folder),
        "MLX_PORT": str(port),
        "PROXY": "off",
        "REANCHOR": "off",
        "LOG_ROOT": str(folder / "logs"),
        "DEFAULT_TEMPERATURE": "0",
        "ORACLE_LOG": str(log),
        "LOG_JSON": "true",
    }
    child = subprocess.Popen([sys.executable, "-m", "start_llm", "serve"], cwd=ROOT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: healthy(url))
        yield url, child
    finally:
        child.kill()
        child.wait(WAIT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


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
    with process(oracle_path(kind), tmp_path, log) as (url, child):
        for i in range(TURNS):
            messages.append({"role": "user", "content": f"part {i}: " + "word " * (TURN_TOKENS // 2)})
            usage = turn(url, messages)
        known = usage["total_tokens"]
        assert known >= 20_000
        until(lambda: figure(url, "kv_disk_waiting_bytes") == 0 and figure(url, "kv_disk_waiting_segments") == 0)
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)
    since = mark(log)
    with process(oracle_path(kind), tmp_path, log) as (url, _):
        messages.append({"role": "user", "content": "and now " * 100})
        usage = turn(url, messages)
    assert work_done(log, since) <= 1.1 * (usage["prompt_tokens"] - known), json.dumps(usage)
