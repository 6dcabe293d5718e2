"""Damage to any file that the server keeps: the next start serves, a running server goes on, and no answer is wrong."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.files.damage import damage_somewhere
from tests.integration.live import Live, Start

WORDS = "word " * 300


def respond(server: Live, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", json={"model": "default", "input": "hi"} | body)


def folders(root: Path) -> list[Path]:
    return [
        folder for folder in [root, *root.rglob("*")] if folder.is_dir() and any(p.is_file() for p in folder.iterdir())
    ]


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.thorough
def test_random_damages(start: Start, tmp_path: Path, kind: str, count: int) -> None:
    options = {"kv_disk_dir": "auto"}
    whole = tmp_path / "whole"
    with start(kind, whole, **options) as server:
        history: list[dict[str, Any]] = []
        for number in range(2):
            server.turn(history, f"part {number} {WORDS}")
        stored = respond(server).json()["id"]
    chance = random.Random(5)
    for number in range(count):
        cache = tmp_path / str(number)
        shutil.copytree(whole, cache)
        for _ in range(3):
            damage_somewhere(chance.choice(folders(cache)), chance)
        with start(kind, cache, **options) as server:
            after = list(history)
            server.turn(after, f"part 2 {WORDS}")
            assert respond(server, previous_response_id=stored).status_code in (200, 404)
            damage_somewhere(chance.choice(folders(cache)), chance)
            server.turn(after, f"part 3 {WORDS}")
            again = respond(server, store=True)
            assert again.status_code == 200
            assert server.get("/health").status_code == 200
        shutil.rmtree(cache)
