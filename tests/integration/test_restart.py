"""A conversation goes on after the server is gone: nothing that was written is computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import Live, Start

Messages = list[dict[str, Any]]


def turns(server: Live, messages: Messages, *words: str) -> tuple[Messages, dict[str, Any]]:
    """One turn for each of the words, sent a few thousand times at first. The history after them, the last report."""
    messages = list(messages)
    reports = [server.turn(messages, f"{word} " * (60 if messages else 3000)) for word in words]
    return messages, reports[-1]


def damage(others: set[Path]) -> None:
    """A byte in the last run of the other conversation changes."""
    runs = [path for path in others if path.name.startswith("r")]
    last = max(runs, key=lambda path: int(path.name[1:].partition("-")[0]))
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_the_next_turn_after_a_restart_computes_what_is_new(
    start: Start, tmp_path: Path, kind: str, damaged: bool
) -> None:
    with start(kind, kv_disk_dir="auto") as server:
        other, _ = turns(server, [], "other", "and", "so")
    (folder,) = (path for path in (tmp_path / "kv").iterdir() if path.is_dir())
    others = set(folder.glob("*.kv"))
    with start(kind, kv_disk_dir="auto") as server:
        messages, _ = turns(server, [], "word", "and", "then")
    if damaged:
        damage(others)
    with start(kind, kv_disk_dir="auto") as server:
        _, report = turns(server, messages, "at last")
        assert report["computed"] <= report["new"] and server.work() == report["computed"]
        assert report["reused"] + report["computed"] == report["prompt"]
        _, report = turns(server, other, "at last")
        assert (report["computed"] > report["new"]) is damaged
