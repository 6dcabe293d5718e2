from __future__ import annotations

import json
import stat
from pathlib import Path
from urllib.request import proxy_bypass_environment

import httpx
import pytest

from start_llm.core.modelmap import PROXIED
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings, load_settings
from start_llm.proxy.config import (
    ADDITIONS,
    CONFIG,
    master_key,
    proxy_config,
    proxy_environment,
    proxy_model_names,
    write_config,
)
from tests.proxy.stub import CARD


def settings(**values: object) -> Settings:
    return load_settings(None, **values)


def test_names_are_the_served_one_and_the_public_one() -> None:
    named = settings(model_path="org/Big-4bit", proxy_model_id=None)
    assert proxy_model_names(named, "Big-4bit") == ["Big-4bit", "openai/org/Big-4bit", "default"]
    assert proxy_model_names(settings(proxy_model_id="mine"), "mine") == ["mine", "default"]
    assert proxy_model_names(settings(), "openai/small") == ["small", "openai/small", "default"]


@pytest.mark.parametrize(("given", "asked"), [("small", "small"), ("openai/small", "small"), ("mine", "default")])
def test_the_server_is_asked_for_a_name_that_it_knows(given: str, asked: str) -> None:
    named = settings(proxy_model_id="mine")
    config = proxy_config(named, server_url="http://h:1", model_id=given, master_key="k", card=CARD)
    assert {entry["litellm_params"]["model"] for entry in config["model_list"][:-1]} == {f"hosted_vllm/{asked}"}
    assert "mine" in [entry["model_name"] for entry in config["model_list"]]


def test_every_entry_leads_to_the_server_and_takes_messages() -> None:
    config = proxy_config(settings(api_key="k1"), server_url="http://h:1/", model_id="m", master_key="sk-1", card=CARD)
    models = {entry["model_name"]: entry["litellm_params"]["model"] for entry in config["model_list"]}
    assert models.pop("*") == f"hosted_vllm/{PROXIED}*"
    assert set(models.values()) == {"hosted_vllm/m"}
    for entry in config["model_list"]:
        assert entry["litellm_params"]["api_base"] == "http://h:1/v1"
        assert entry["litellm_params"]["api_key"] == "k1"
        assert entry["model_info"]["supported_endpoints"] == ["/v1/messages"]
    ids = [entry["model_info"]["id"] for entry in config["model_list"]]
    assert ids[0] == "m" and len(set(ids)) == len(ids) == 4
    assert config["general_settings"]["master_key"] == "sk-1"


@pytest.mark.parametrize("able", [False, True])
def test_the_model_is_said_to_do_what_it_can(able: bool) -> None:
    card = ModelCard("m", 0, 4096, tools=able, reasoning=able, vision=able)
    config = proxy_config(settings(), server_url="http://h:1", model_id="m", master_key="k", card=card)
    for entry in config["model_list"]:
        info = entry["model_info"]
        assert info["max_input_tokens"] == info["max_output_tokens"] == 4096
        names = ("supports_vision", "supports_reasoning", "supports_function_calling")
        assert [info[name] for name in names] == [able, able, able]


def test_the_proxy_shows_life_a_little_more_often_than_was_promised() -> None:
    pinging = settings(sse_ping_seconds=5)
    config = proxy_config(pinging, server_url="http://h:1", model_id="m", master_key="k", card=CARD)
    assert {entry["litellm_params"]["keepalive_seconds"] for entry in config["model_list"]} == {4.0}
    assert config["litellm_settings"]["sse_keepalive_ping_interval_seconds"] == 4.0
    assert config["litellm_settings"]["anthropic_sse_ping_interval_seconds"] == 4.0


def test_the_environment_is_offline_and_not_the_users() -> None:
    given = {"PATH": "/bin", "DATABASE_URL": "postgres://x", "LITELLM_MODE": "DEV", "NO_PROXY": "example.org"}
    made = proxy_environment(given)
    assert "DATABASE_URL" not in made
    assert made["LITELLM_LOCAL_MODEL_COST_MAP"] == "True" and made["LITELLM_MODE"] == "PRODUCTION"
    assert made["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1" and made["no_proxy"] == "127.0.0.1,localhost,::1"
    assert given["LITELLM_MODE"] == "DEV"


def test_nodes_are_asked_without_the_users_http_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM goes by the environment: another machine would see the nodes' keys."""
    nodes = ["http://Mac-2:8080", "https://192.168.1.12", "http://[fd00::12]:8080"]
    made = proxy_environment({"HTTP_PROXY": "http://squid:3128"}, nodes)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, made[name])
    assert all(proxy_bypass_environment(httpx.URL(node).host) for node in nodes)
    assert not proxy_bypass_environment("api.example.org")


def test_files_are_the_users_own(tmp_path: Path) -> None:
    write_config(tmp_path, {"a": 1}, {"b": 2})
    files = [tmp_path / CONFIG, tmp_path / ADDITIONS]
    assert [json.loads(file.read_text()) for file in files] == [{"a": 1}, {"b": 2}]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_key_is_made_once_and_kept(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    first = master_key(settings(), env)
    assert first.startswith("sk-") and len(first) > 30
    assert env.read_text() == f"LITELLM_MASTER_KEY={first}\n"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert master_key(settings(), env) == first
    assert load_settings(env).litellm_master_key == first


def test_a_set_key_wins_and_writes_nothing(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    assert master_key(settings(litellm_master_key="mine"), env) == "mine"
    assert not env.exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A=1\nLITELLM_MASTER_KEY=\n# note\nB=2", "A=1\nLITELLM_MASTER_KEY={}\n# note\nB=2"),
        ("export LITELLM_MASTER_KEY=off\nA=1\n# note\nB=2\n", "LITELLM_MASTER_KEY={}\nA=1\n# note\nB=2\n"),
        ("A=1\n# note\nB=2", "A=1\n# note\nB=2\nLITELLM_MASTER_KEY={}\n"),
    ],
)
def test_only_that_line_changes(tmp_path: Path, before: str, after: str) -> None:
    env = tmp_path / ".env"
    env.write_text(before)
    env.chmod(0o644)
    key = master_key(settings(), env)
    assert env.read_text() == after.format(key)
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [".env"]


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("A=1\n")
    link = tmp_path / ".env"
    link.symlink_to(real)
    key = master_key(settings(), link)
    assert link.is_symlink() and real.read_text() == f"A=1\nLITELLM_MASTER_KEY={key}\n"


def test_the_env_file_is_replaced_as_a_whole_and_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure behind the first start must not cost somebody's settings."""
    env = tmp_path / ".env"
    env.write_text("A=1\n")
    written: list[tuple[Path, bool]] = []

    def no_room(path: Path, data: bytes, *, sync: bool = False) -> None:
        written.append((path, sync))
        raise OSError("no room")

    monkeypatch.setattr("start_llm.proxy.config.write_atomic", no_room)
    assert master_key(load_settings(None), env).startswith("sk-")
    assert written == [(env, True)] and env.read_text() == "A=1\n"


def test_a_key_that_cannot_be_kept_is_good_for_this_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = tmp_path / "missing" / ".env"
    key = master_key(settings(), env)
    assert key.startswith("sk-")
    assert "LITELLM_MASTER_KEY" in caplog.text and key not in caplog.text


def test_a_file_that_is_no_text_is_left_as_it_is(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_bytes(b"A=\xff\xfe\n")
    assert master_key(settings(), env).startswith("sk-")
    assert env.read_bytes() == b"A=\xff\xfe\n"
