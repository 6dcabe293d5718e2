"""What the proxy says of the servers' models."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.proxy.passthrough import _abilities_of


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"details": None, "capabilities": {"tools": True}},
        {"capabilities": None, "context_length": 4096},
        {"capabilities": {}, "context_length": "many"},
    ],
)
def test_a_node_that_says_too_little_of_a_model_breaks_nothing(card: dict[str, Any]) -> None:
    assert _abilities_of(card) == {}


def test_what_a_card_says_is_told_in_litellms_words() -> None:
    told = _abilities_of({"capabilities": {"tools": True}, "context_length": 4096})
    assert told["mode"] == "chat" and 4096 in told.values()
    assert _abilities_of({"details": {"task": "speech"}}) == {"mode": "audio_speech"}
