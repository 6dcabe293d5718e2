"""``LOG_JSON=true``: whatever the process says, from its start to its end, is JSON lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.live import WAIT

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent


def serve(folder: Path, **settings: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "START_LLM_CACHE_DIR": str(folder),
        "MLX_PORT": "0",
        "PROXY": "off",
        "KV_DISK_DIR": "off",
        "LOG_ROOT": str(folder / "logs"),
        "LOG_JSON": "true",
    } | settings
    command = [sys.executable, "-m", "start_llm", "serve"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def entries(text: str) -> list[dict[str, Any]]:
    """Every line as JSON; a line of anything else fails here."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.live
def test_a_run_from_start_to_interrupt(oracle_path: Callable[..., Path], tmp_path: Path) -> None:
    child = serve(tmp_path, MODEL_PATH=str(oracle_path("plain")), TRUST_REMOTE_CODE="true")
    try:
        assert child.stdout is not None
        said: list[dict[str, Any]] = []
        while not said or not said[-1]["message"].startswith("ready "):
            said += entries(child.stdout.readline())
        url = said[-1]["message"].split("Anthropic ")[1]
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        child.send_signal(signal.SIGINT)
        rest = entries(child.communicate(timeout=WAIT)[0])
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()
    assert {entry["level"] for entry in said} == {"info"}
    assert [entry["status"] for entry in rest if "id" in entry] == [200]


@pytest.mark.live
@pytest.mark.parametrize(
    ("settings", "code", "word"),
    [
        ({"MODEL_PATH": "/does/not/exist"}, 2, "/does/not/exist"),
        ({"MODEL_FAMILY": "nonsense"}, 2, "MODEL_FAMILY"),
        ({"MLX_PORT": "taken"}, 2, "is in use"),
    ],
)
def test_what_stops_the_start(settings: dict[str, str], code: int, word: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        child = serve(tmp_path, **{k: port if v == "taken" else v for k, v in settings.items()})
        said = entries(child.communicate(timeout=WAIT)[0])
    assert child.returncode == code
    assert said[-1]["level"] == "error" and word in said[-1]["message"]
    assert sum(word in entry["message"] for entry in said) == 1, "once is enough"
