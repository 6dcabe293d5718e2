"""``LOG_JSON=true``: whatever the process says, from its start to its end, is JSON lines."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.processes import WAIT, Spawn

pytestmark = [pytest.mark.thorough, pytest.mark.live]


def entries(folder: Path) -> list[dict[str, Any]]:
    """Every line that it said as JSON; a line of anything else fails here."""
    return [json.loads(line) for line in (folder / "said").read_text().splitlines()]


def test_a_run_from_start_to_interrupt(spawn: Spawn, tmp_path: Path) -> None:
    with spawn() as (url, child):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        child.send_signal(signal.SIGINT)
        assert child.wait(WAIT) == 0
    told = entries(tmp_path)
    ready = next(place for place, entry in enumerate(told) if entry["message"].startswith("ready "))
    assert {entry["level"] for entry in told[: ready + 1]} == {"info"}
    assert [entry["status"] for entry in told[ready:] if "id" in entry] == [200]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"MODEL_PATH": "/does/not/exist"}, "/does/not/exist"),
        ({"MODEL_FAMILY": "nonsense"}, "MODEL_FAMILY"),
        ({"MLX_PORT": "taken"}, "is in use"),
    ],
)
def test_what_stops_the_start(spawn: Spawn, tmp_path: Path, settings: dict[str, str], word: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {name: value.replace("taken", str(taken.getsockname()[1])) for name, value in settings.items()}
        with spawn(ready=False, **given) as (_, child):
            assert child.wait(WAIT) == 2
    told = entries(tmp_path)
    assert told[-1]["level"] == "error" and word in told[-1]["message"]
    assert sum(word in entry["message"] for entry in told) == 1, "once is enough"
