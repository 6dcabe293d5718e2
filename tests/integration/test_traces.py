"""Recorded sessions of Claude Code: a turn computes what is new, a new session starts from the known head."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.replay import raw_reply
from tests.integration.live import Live, live

TRACES = Path(os.environ.get("START_LLM_TRACES") or Path(__file__).parents[3] / "shared" / "traces") / "claude"
SESSION = ("1-main", "2-continue", "3-continue")
FRESH = "4-fresh"

pytestmark = [
    pytest.mark.thorough,  # `test_recordings` has the shorter form
    pytest.mark.skipif(not (TRACES / f"{FRESH}.jsonl").is_file(), reason="no recorded traces here"),
]


def recorded(run: str) -> Iterator[dict[str, Any]]:
    for line in (TRACES / f"{run}.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)


def replay(server: Live, entry: dict[str, Any], replies: Path) -> dict[str, Any]:
    """Sends a recorded request; the model says what was answered. The message, with what was computed for it."""
    replies.write_text(raw_reply(entry["reply"]), "utf-8")
    before = server.passes()
    body = {**entry["body"], "stream": False, "max_tokens": 2000}
    response = httpx.post(f"{server.url}{entry['path']}", json=body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    said = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    assert said.strip() == entry["reply"]["text"].strip()
    names = [block["name"] for block in message["content"] if block["type"] == "tool_use"]
    assert names == [call["name"] for call in entry["reply"]["calls"]]
    header = dict(part.split("=") for part in response.headers["x-start-llm-cache"].split("; "))
    report = {name: int(header[name]) for name in ("prompt", "reused", "new")}
    computed = server.prompt_work(report["prompt"], before)
    return {**report, "computed": computed, "generated": message["usage"]["output_tokens"]}


def agreed(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_claude_code(
    oracle_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    replies = tmp_path / "reply"
    monkeypatch.setenv("ORACLE_REPLIES", str(replies))
    with live(oracle_path(kind), tmp_path, served_model_name="local-model") as server:
        rows = [replay(server, entry, replies) for run in SESSION for entry in recorded(run)]
        assert sum(row["computed"] for row in rows[1:]) <= 1.05 * sum(row["new"] for row in rows[1:]), rows
        # `new` is no more than what the client's request has beyond the last one and its answer, but for a message that
        # the client wrote down otherwise than it was answered (it adds defaults to a call's arguments).
        grown = rows[-1]["prompt"] - rows[0]["prompt"] - sum(row["generated"] for row in rows[:-1])
        assert sum(row["new"] for row in rows[1:]) <= 1.4 * grown, (grown, rows)
        before = list(server.prompts.values())
        fresh = [replay(server, entry, replies) for entry in recorded(FRESH)]
        prompt = list(server.prompts.values())[len(before)]
        shared = max(agreed(prompt, other) for other in before)
        # The question stands in front of the client's second system message, so all behind it is new in its place.
        assert shared >= 0.8 * len(prompt)
        assert fresh[0]["reused"] >= (shared if kind == "plain" else 0.98 * shared), (shared, fresh[0])
        # The client cuts "cd DIR && " off the last call, as it did before.
        assert sum(row["computed"] for row in fresh[1:]) <= 1.05 * sum(row["new"] for row in fresh[1:]), fresh
