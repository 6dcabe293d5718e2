"""CONTEXT_SCALE=auto: what a model has room for decides what clients of the Anthropic API are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.models import loader
from tests.integration.live import Live
from tests.integration.pooled import admin

SHORT = 4096
ASKED = {"max_tokens": 8, "messages": [{"role": "user", "content": "word " * 300}]}


def test_counts_follow_the_room_of_the_model_that_answers(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr(loader, "FOLDER", files)
    (files / "oracle-hybrid.toml").write_text(f"context = {SHORT}\n")
    with serve(context_scale="auto") as server:
        assert admin(server, "load", model="oracle-hybrid").status_code == 200
        cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
        assert cards["oracle-hybrid"]["context_length"] == SHORT
        for name in ("oracle-plain", "oracle-hybrid"):
            scale = cards[name]["details"]["context_scale"]
            assert scale == max(1.0, 200_000 / cards[name]["context_length"])
            _told(server, name, scale)


def _told(server: Live, name: str, scale: float) -> None:
    """All counts of this API are multiplied, those of the others are not."""
    asked: Any = {"model": name, "enable_thinking": False, **ASKED}  # as in this API, where nobody asks for it
    plain = server.chat(asked.pop("messages"), **asked)["body"]["usage"]
    counted = server.post("/v1/messages/count_tokens", json={"model": name, **ASKED})
    assert abs(counted.json()["input_tokens"] - plain["prompt_tokens"] * scale) <= 1
    answer = server.post("/v1/messages", json={"model": name, **ASKED}).json()["usage"]
    read = answer["input_tokens"] + answer["cache_read_input_tokens"]
    assert abs(read - plain["prompt_tokens"] * scale) <= 2 and answer["output_tokens"] == round(8 * scale)
