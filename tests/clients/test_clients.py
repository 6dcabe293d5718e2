"""Every client's plan: where it points to, and that it stays in its own folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from start_llm.clients import CLIENTS
from start_llm.clients.agent import Endpoint

ENDPOINT = Endpoint(url="http://127.0.0.1:4321", key="the-key", model="the-model", context=54_321, answer=4_096)
LARGE = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL")
SMALL = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
DOCS = Path(__file__).parents[2] / "docs" / "clients"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_plan_leads_to_the_endpoint_and_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    plan = CLIENTS[name].plan(ENDPOINT, tmp_path)
    said = " ".join([*plan.env.values(), *plan.files.values(), *plan.arguments])
    assert "http://127.0.0.1:4321" in said and "the-key" in said and "the-model" in said
    assert all(path.is_relative_to(tmp_path) for path in (*plan.files, *plan.secrets.values()))
    assert not set(plan.unset) & set(plan.env)
    assert name == "aider" or "54321" in said or name == "cline"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_says_how_to_install_it_and_has_a_page(name: str) -> None:
    client = CLIENTS[name]
    assert client.name == name and "install" in client.install
    page = (DOCS / f"{name}.md").read_text()
    assert client.title in page and f"launch {name}" in page and client.install.split(" (")[0] in page


def test_only_documented_variables_are_set(tmp_path: Path) -> None:
    for name, client in CLIENTS.items():
        page = (DOCS / f"{name}.md").read_text()
        plan = client.plan(ENDPOINT, tmp_path)
        missing = [variable for variable in {**plan.env, **plan.defaults, **plan.secrets} if variable not in page]
        assert missing == [], f"docs/clients/{name}.md does not name {missing}"


@pytest.mark.parametrize("name", ["pi", "opencode", "openclaw", "qwen", "aider"])
def test_a_client_is_told_whether_the_model_sees(name: str, tmp_path: Path) -> None:
    """Claude Code and Codex send pictures to any model."""
    words = {"pi": '"image"', "opencode": '"image"', "openclaw": '"image"', "qwen": '"image": true'}
    word = words.get(name, '"supports_vision": true')
    for sees in (False, True):
        text = "".join(CLIENTS[name].plan(replace(ENDPOINT, sees=sees), tmp_path).files.values())
        assert (word in text) is sees


def test_claude_codes_small_model_is_the_servers_where_that_has_one(tmp_path: Path) -> None:
    one = CLIENTS["claude"].plan(ENDPOINT, tmp_path).env
    assert {one[name] for name in (*LARGE, *SMALL, "CLAUDE_CODE_SUBAGENT_MODEL")} == {"the-model"}
    two = CLIENTS["claude"].plan(replace(ENDPOINT, small="claude-haiku-4-5"), tmp_path).env
    assert {two[name] for name in LARGE} == {"the-model"} and {two[name] for name in SMALL} == {"claude-haiku-4-5"}
    assert "CLAUDE_CODE_SUBAGENT_MODEL" not in two, "a sub-agent has the model that it is made for"


def test_openclaws_port_is_one_and_the_same(tmp_path: Path) -> None:
    plan = CLIENTS["openclaw"].plan(ENDPOINT, tmp_path)
    config = json.loads(plan.files[tmp_path / "openclaw.json"])
    assert str(config["gateway"]["port"]) == plan.env["OPENCLAW_GATEWAY_PORT"]


def test_pi_keeps_its_history_in_a_small_context(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    small = CLIENTS["pi"].plan(replace(ENDPOINT, context=8192), tmp_path)
    assert json.loads(small.files[settings])["compaction"]["reserveTokens"] == 2048
    assert settings not in CLIENTS["pi"].plan(replace(ENDPOINT, context=131_072), tmp_path).files
