"""FALLBACK_MODEL on this side of the proxy: settings, LiteLLM's entry, what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.proxy.config import additions, providers, proxy_config, usable
from tests.proxy.stub import CARD

MODEL = "anthropic/claude-sonnet-4-5"


def settings(**values: object) -> Settings:
    return load_settings(None, **values)


def config_of(given: Settings) -> dict[str, object]:
    return proxy_config(given, server_url="http://h:1", model_id="m", master_key="k", card=CARD)


def said(given: Settings, **environment: str) -> tuple[list[str], Settings]:
    lines: list[str] = []
    return lines, usable(given, environment, lines.append)


@pytest.mark.parametrize("value", ["claude", "anthropic/", "/claude", "a b/c", "openai/a b", "openai/\n", "x" * 300])
def test_a_bad_name_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(SettingsError, match=r"FALLBACK_MODEL=.*anthropic/claude-sonnet-4-5"):
        settings(fallback_model=value)


@pytest.mark.parametrize("value", ["localhost:8080", "ftp://h", "http://me:secret@h/v1", "http://", "https://a b"])
def test_a_bad_address_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(SettingsError, match=r"FALLBACK_API_BASE=.*http://192"):
        settings(fallback_model=MODEL, fallback_api_base=value)


def test_it_is_off_by_default() -> None:
    for given in (settings(), settings(fallback_model="off"), settings(fallback_model="")):
        assert given.fallback_model is None and said(given) == ([], given)
        config = config_of(given)
        assert "fallback" not in json.dumps(config) and "extra_headers" not in json.dumps(config)
        assert config["router_settings"] == {"num_retries": 0, "disable_cooldowns": True}
        assert additions(given, "http://h:1", "k", Path("/nowhere"))["fallback"] is None


def test_the_entry_is_beside_the_models_of_this_server_and_none_of_them() -> None:
    """A name that the two had in common would share requests out between them."""
    given = settings(fallback_model="openai/small", model_path="small", fallback_api_key="k2")
    *own, last = config_of(given)["model_list"]  # type: ignore[misc]
    assert last["model_name"] == "fallback:openai/small" == last["model_info"]["id"]
    assert last["litellm_params"]["model"] == "openai/small" and last["litellm_params"]["api_key"] == "k2"
    assert "api_base" not in last["litellm_params"], "the provider's own"
    assert last["litellm_params"]["extra_headers"] == {"x-start-llm-fallback": "off"}
    for entry in own:
        assert entry["litellm_params"]["model"].startswith("hosted_vllm/")
        assert entry["litellm_params"]["extra_headers"] == {"x-start-llm-head": "when-planned"}
        assert entry["model_info"]["cooldown_time"] == 0, "LiteLLM leaves this server never alone"


def test_it_is_said_aloud_where_conversations_go() -> None:
    lines, usually = said(settings(fallback_model=MODEL), ANTHROPIC_API_KEY="k1")
    assert len(lines) == 1 and lines[0].startswith("fallback  ON") and lines[0].endswith(MODEL)
    assert usually.fallback_model == MODEL and "k1" not in lines[0]
    lines, _ = said(settings(fallback_model="openai/x", fallback_api_base="http://h:2/v1", fallback_api_key="k1"))
    assert lines[0].endswith("to openai/x at http://h:2/v1")


def test_a_key_that_is_not_there_is_said() -> None:
    lines, still = said(settings(fallback_model=MODEL))
    assert "ANTHROPIC_API_KEY is not set" in lines[0] and still.fallback_model == MODEL


def test_a_provider_that_litellm_does_not_know_is_named() -> None:
    assert {"anthropic", "openai", "gemini", "hosted_vllm"} <= set(providers()), "LiteLLM's table has moved"
    lines, without = said(settings(fallback_model="antropic/claude"))
    assert lines == [
        "fallback  off: FALLBACK_MODEL='antropic/claude': LiteLLM knows no provider 'antropic'; "
        "the nearest one is 'anthropic'."
    ]
    assert without.fallback_model is None


def test_without_the_proxy_there_is_no_fallback() -> None:
    lines, without = said(settings(fallback_model=MODEL, proxy="off"))
    assert lines == ["fallback  off: FALLBACK_MODEL works through the proxy only, and PROXY=off."]
    assert without.fallback_model is None
