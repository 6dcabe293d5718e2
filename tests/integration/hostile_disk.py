"""A server on a disk that fills up, and then on one that may only be read. Run by test_hostile_disk.

usage: hostile_disk.py MODEL FOLDER, as root of a mount namespace of its own. Mounts a small tmpfs on FOLDER.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from start_llm.kvcache.disk.tier import DiskTier
from tests.integration.live import Live, live
from tests.waiting import until

SMALL = "24m"


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def times(self, words: str) -> int:
        return sum(words in line for line in self.lines)


def turn(server: Live, messages: list[dict[str, Any]]) -> None:
    """One more turn, whose answer must be right."""
    server.turn(messages, f"part {len(messages)} " + "word " * 500)


def respond(server: Live, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", json={"model": "default", "input": "hi"} | body)


def until_paused(server: Live, messages: list[dict[str, Any]]) -> None:
    """Turn by turn: the figures are those of the model thread's last step."""
    until(lambda: server.figure("kv_disk_paused") == 1 or turn(server, messages), "the tier does not pause")


def settled(server: Live) -> bool:
    return server.figure("kv_disk_waiting_bytes") == 0


def fill(path: Path) -> None:
    """Takes all the room that is left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError:
        os.close(descriptor)


def fills_up(model: Path, folder: Path, said: Said) -> None:
    """Said once, the tier pauses, answers stay right; with room again it comes back."""
    messages: list[dict[str, Any]] = []
    filler = folder / "somebody else's"
    with live(model, folder / "cache", kv_disk_dir="auto", kv_disk_bytes=1 << 30) as server:
        for _ in range(2):  # a first request alone may be a side request, which is not written
            turn(server, messages)
        until(lambda: settled(server) and server.figure("kv_disk_written_files_total") > 0)
        fill(filler)
        for _ in range(4):
            turn(server, messages)
            until(lambda: settled(server))
        until_paused(server, messages)
        assert said.times("the disk tier pauses") == 1, said.lines
        assert said.times("cannot be logged now") <= 1, said.lines
        refused = respond(server, store=True)
        assert refused.status_code == 503 and "disk" in refused.json()["error"]["message"], refused.text
        quiet = respond(server)
        assert quiet.status_code == 200 and quiet.json()["store"] is False, quiet.text
        assert len(said.lines) < 12, said.lines
        filler.unlink()
        until(lambda: turn(server, messages) or server.figure("kv_disk_paused") == 0)
        assert said.times("the disk tier goes on") == 1
        kept = respond(server, store=True)
        assert kept.status_code == 200
        assert server.get(f"/v1/responses/{kept.json()['id']}").status_code == 200


def may_only_be_read(model: Path, folder: Path, said: Said) -> None:
    """The server starts and answers; what needs a file says so."""
    for cache in (folder / "cache", folder / "never made"):
        said.lines.clear()
        with live(model, cache, kv_disk_dir="auto") as server:
            messages: list[dict[str, Any]] = []
            turn(server, messages)
            turn(server, messages)
            until_paused(server, messages)
            assert said.times("the disk tier pauses") == 1 and said.times("cannot be logged now") == 1, said.lines
            assert respond(server, store=True).status_code == 503
            assert respond(server).json()["store"] is False
            assert server.get("/health").status_code == 200
        assert len(said.lines) < 8, said.lines


def main(model: Path, folder: Path) -> None:
    DiskTier.retry_seconds = 1.0  # turns go on until the tier has tried again
    said = Said()
    logging.getLogger("start_llm").addHandler(said)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)], check=True)
    fills_up(model, folder, said)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    may_only_be_read(model, folder, said)
    print("all right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
