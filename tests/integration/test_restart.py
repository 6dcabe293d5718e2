"""A conversation goes on after the server is gone: nothing that was written is computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import live
from tests.oracle import expected_truth


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_the_next_turn_after_a_restart_computes_what_is_new(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "word " * 3000 + "[[truth]]"}]
    with live(oracle_path(kind), tmp_path, kv_disk_dir="auto") as server:
        first = server.chat(messages)
        known = len(server.prompt_of(first)) + first["report"]["generated"]
    messages += [
        {"role": "assistant", "content": first["message"]["content"]},
        {"role": "user", "content": "and " * 50 + "[[truth]]"},
    ]
    with live(oracle_path(kind), tmp_path, kv_disk_dir="auto") as server:
        second = server.chat(messages)
        prompt = server.prompt_of(second)
        assert second["message"]["content"] == expected_truth(prompt)
        assert server.work() <= 1.1 * (len(prompt) - known)
