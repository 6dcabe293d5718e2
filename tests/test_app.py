"""Starting and stopping the whole: what is said, what goes wrong, and how."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from rich.console import Console

import start_llm
from scripts.settings_docs import env_example
from start_llm.app import App
from start_llm.core.errors import Unavailable
from start_llm.core.settings import load_settings
from start_llm.models.device import Device
from tests.core.test_settings import FIRST_DESIGN
from tests.integration.live import places
from tests.kvcache.replay import all_events
from tests.model_thread import on_model_thread
from tests.oracle import build_oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_oracle(tmp_path_factory.mktemp("model") / "oracle", "plain")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[App, list[str]]]]:
    apps: list[App] = []

    def app(**settings: Any) -> tuple[App, list[str]]:
        said: list[str] = []
        made = App(load_settings(None, **places(model, tmp_path) | settings), say=said.append)
        apps.append(made)
        return made, said

    yield app
    for made in apps:
        made.stop()


def test_the_first_minute_says_what_one_needs_to_know(make: Callable[..., Any]) -> None:
    app, said = make()
    app.start()
    text = "\n".join(said)
    for part in (app.server_url, "oracle", "GB in memory", "/kv", "launch claude"):
        assert part in text
    assert httpx.get(f"{app.server_url}/health").json()["state"] == "ready"


def test_an_agent_is_offered_only_where_its_first_prompt_fits(make: Callable[..., Any]) -> None:
    app, said = make(max_kv_size=8192)
    app.start()
    offered, left_out = next((line, said[at + 1]) for at, line in enumerate(said) if line.startswith("agents "))
    assert "launch codex" in offered and "pi, cline, cn, aider)" in offered and "claude" not in offered
    assert left_out.partition(" of ")[2].startswith("claude, opencode, openclaw, qwen, kilo is longer than")


@pytest.mark.parametrize("lines", [FIRST_DESIGN, env_example().replace("# ", "")], ids=["first design", "the example"])
def test_a_server_starts_with_a_file_of_the_first_design_and_with_all_lines_of_the_example(
    model: Path, tmp_path: Path, lines: str
) -> None:
    """Places of this test come from flags, which win."""
    (tmp_path / ".env").write_text("\n".join(re.findall(r"^[A-Z_0-9]+=.*", lines, re.MULTILINE)))
    settings = load_settings(tmp_path / ".env", **places(model, tmp_path))
    with App(settings, say=lambda line: None) as app:
        asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert httpx.post(f"{app.url}/v1/chat/completions", json=asked, timeout=120).json()["choices"]
        assert httpx.get(f"{app.url}/health").json()["state"] in {"ready", "busy"}


def test_a_program_can_have_a_server_for_a_block(make: Callable[..., Any]) -> None:
    assert start_llm.App is App and start_llm.load_settings is load_settings
    with make()[0] as app:
        assert httpx.get(f"{app.url}/health").json()["state"] == "ready"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{app.url}/health")
    with pytest.raises(AttributeError, match="no attribute 'Ap'"):
        start_llm.Ap  # noqa: B018 - that it raises is what is asked


def test_routers_are_told_of_what_a_conversation_left(make: Callable[..., Any]) -> None:
    app, said = make(kv_events="tcp://127.0.0.1:0")
    app.start()
    line = next(line for line in said if line.startswith("events"))
    replay = line.rpartition("missed ones: ")[2].rstrip(")")
    words = " ".join(f"word{n}" for n in range(200))
    body = {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": 4}
    assert httpx.post(f"{app.url}/v1/chat/completions", json=body).status_code == 200
    cleared, stored = all_events(replay, 2)[:2]
    assert cleared == ["AllBlocksCleared"]
    name, names, parent, tokens, size, *_ = stored
    assert (name, parent, size) == ("BlockStored", None, 64) and len(tokens) == 64 * len(names)
    text = on_model_thread(app, lambda model, tokenizer: tokenizer.decode(tokens))
    assert "word0 word1" in text and "word190" in text
    assert "start_llm_kv_events_stored_total" in httpx.get(f"{app.url}/metrics").text


def test_untrusted_code_is_refused_with_the_settings_name(make: Callable[..., Any]) -> None:
    app, _ = make(trust_remote_code=False)
    with pytest.raises(Unavailable, match="TRUST_REMOTE_CODE=true"):
        app.start()


def test_a_model_that_does_not_fit_refuses_the_start(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small = Device("Linux", "some CPU", 2**20, "cpu", 2**20)
    monkeypatch.setattr("start_llm.engine.assembly.inspect_device", lambda accelerator: small)
    app, _ = make()
    with pytest.raises(Unavailable, match=r"of the [\d.]+ .?B that a model may use here.*Choose a smaller model"):
        app.start()


def test_what_a_library_says_of_named_files_ends_the_start_in_a_sentence(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _ = make()

    def broken(progress: Any) -> int:
        raise Exception("expected value at line 1")  # as `tokenizers` says of a damaged tokenizer.json

    monkeypatch.setattr(app.encoders, "prepare", broken)
    with pytest.raises(Unavailable, match="expected value at line 1"):
        app.start()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{app.url}/health")


def test_a_stranger_on_the_proxys_port_is_named_and_the_server_goes_on(make: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        app, said = make(proxy="on", proxy_port=taken.getsockname()[1], litellm_master_key="sk-test")
        app.start()
        assert any(line.startswith("proxy     off") for line in said)
        assert httpx.get(f"{app.server_url}/health").status_code == 200


@pytest.mark.parametrize("terminal", [False, True])
def test_the_proxys_key_is_shown_on_a_terminal_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Elsewhere it would stay in a log."""
    shown = io.StringIO()
    ready = Mock(url="http://127.0.0.1:4000", master_key="sk-secret")
    monkeypatch.setattr("start_llm.app.LiteLLMProxy", Mock(return_value=ready))
    settings = load_settings(None, **places(model, tmp_path) | {"proxy": "on"})
    app = App(settings, console=Console(file=shown, force_terminal=terminal, width=200))
    try:
        app.start()
    finally:
        app.stop()
    assert ready.url in shown.getvalue()
    assert ("sk-secret" in shown.getvalue()) is terminal


def test_what_the_start_says_has_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """It quotes names of files that stand in a model's files, and command lines of other processes."""
    shown = io.StringIO()
    settings = load_settings(None, start_llm_cache_dir=tmp_path, mlx_port=0, log_root=tmp_path)
    app = App(settings, console=Console(file=shown, width=200))
    try:
        app._say("embed     off: \x1b[2Jgone.safetensors \x9b1mis missing")
    finally:
        app.stop()
    assert shown.getvalue() == "embed     off: [2Jgone.safetensors 1mis missing\n"


def test_before_loading_requests_get_503(make: Callable[..., Any]) -> None:
    app, _ = make()
    app._server.start()
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{app.server_url}/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert "loading" in answer.json()["error"]["message"]
    assert httpx.get(f"{app.server_url}/health").json()["state"] == "loading"
