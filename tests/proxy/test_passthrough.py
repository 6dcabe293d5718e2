"""What the proxy says of the servers' models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

Abilities = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def abilities_of(monkeypatch: pytest.MonkeyPatch) -> Abilities:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM fetches it when it is imported
    found: Abilities = import_module("start_llm.proxy.passthrough")._abilities_of
    return found


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"details": None, "capabilities": {"tools": True}},
        {"capabilities": None, "context_length": 4096},
        {"capabilities": {}, "context_length": "many"},
    ],
)
def test_a_node_that_says_too_little_of_a_model_breaks_nothing(abilities_of: Abilities, card: dict[str, Any]) -> None:
    assert abilities_of(card) == {}


def test_what_a_card_says_is_told_in_litellms_words(abilities_of: Abilities) -> None:
    told = abilities_of({"capabilities": {"tools": True}, "context_length": 4096})
    assert told["mode"] == "chat" and 4096 in told.values()
    assert abilities_of({"details": {"task": "speech"}}) == {"mode": "audio_speech"}
