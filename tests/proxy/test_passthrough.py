"""What the proxy says of the servers' models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from start_llm.core.settings import load_settings
from start_llm.proxy.config import names_behind, proxy_config
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.nodes import ServerNode
from tests.proxy.node_stub import nodes
from tests.proxy.stub import CARD

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


def test_a_name_that_the_server_does_not_know_is_made_its_main_models(abilities_of: Abilities) -> None:
    from start_llm.proxy.passthrough import ServerRoutes

    with nodes(1) as [back]:
        settings = load_settings(None, proxy_model_id="mine")
        config = proxy_config(settings, server_url=back.url, model_id="mine", master_key="k", card=CARD)
        fleet = NodeFleet([ServerNode(back.url)], names_behind(config))
        listed = json.loads(asyncio.run(ServerRoutes(config, fleet, {}).models(None)).body)  # type: ignore[arg-type]
    assert [card["id"] for card in listed["data"]] == ["mine", "served"]
