"""How a server's process ends: by a signal, with a model that hangs, with a model thread that dies."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.live import ENDLESS, send_raw
from tests.integration.processes import WAIT, Spawn, process
from tests.waiting import until

pytestmark = pytest.mark.live


def ask(url: str, **more: Any) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": "[[long 20]]"}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body)


def ask_anthropic(url: str) -> str:
    """A streamed answer as it comes, begun with a sign of life."""
    messages = [{"role": "user", "content": "[[long 20]]"}]
    body = {"model": "claude-x", "max_tokens": 50, "stream": True, "messages": messages}
    return httpx.post(f"{url}/v1/messages", json=body).text


def said(folder: Path) -> str:
    text = (folder / "said").read_text()
    for word in ("abort", "Fatal Python error", "terminate called", "Exception ignored"):
        assert word not in text, text
    return text


def test_a_process_that_was_stopped_for_a_while_cuts_no_answer(spawn: Spawn, tmp_path: Path) -> None:
    """Neither one that streams, nor one whose request was half sent."""
    body = {"model": "default", "messages": [{"role": "user", "content": "[[long 60]]"}], "stream": True}
    settings = {"ORACLE_SLEEP_PER_STEP": "0.05", "DRAFTS": "off"}
    with spawn(**settings) as (url, child):
        whole = httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": False}, timeout=WAIT).json()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT) as answer:
            lines = answer.iter_lines()
            told = [next(lines) for _ in range(8)]
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT) as half:
                half.sendall(b"GET /v1/models HTTP/1.1\r\nho")
                child.send_signal(signal.SIGSTOP)
                time.sleep(6.0)
                half.sendall(b"st: localhost\r\n\r\n")
                child.send_signal(signal.SIGCONT)
                assert half.recv(12) == b"HTTP/1.1 200"
            told += lines
        chunks = [json.loads(line.removeprefix("data: ")) for line in told if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert text == whole["choices"][0]["message"]["content"] and told[-2] == "data: [DONE]", told[-3:]
        assert ask(url).status_code == 200
    assert "has not moved" not in said(tmp_path)


@pytest.mark.thorough
def test_a_wedged_model_is_told_refused_and_ended(spawn: Spawn, tmp_path: Path) -> None:
    fault, watchdog = tmp_path / "fault", 6.0
    settings = {"ORACLE_FAULT": str(fault), "GENERATION_WATCHDOG_SECONDS": str(watchdog), "SSE_PING_SECONDS": "1"}
    with spawn(**settings) as (url, child):
        assert ask(url).status_code == 200
        fault.write_text("hang")
        began = time.monotonic()
        streamed: list[str] = []
        other = threading.Thread(target=lambda: streamed.append(ask_anthropic(url)))
        other.start()
        answer = ask(url)
        assert time.monotonic() - began < watchdog + 20  # once 121 s
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "watchdog"
        other.join(60)
        assert "event: error" in streamed[0] and "timeout_error" in streamed[0]

        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["state"] == "wedged"
        assert health.json()["since"].startswith("20") and "has not moved" in health.json()["detail"]
        refused = ask(url)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1

        assert child.wait(2 * watchdog + 30) == 75
    assert "exit code 75" in said(tmp_path)


@pytest.mark.thorough
def test_sigterm_ends_a_wedged_server_and_a_model_that_goes_on_is_forgiven(spawn: Spawn, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    settings = {"ORACLE_FAULT": str(fault), "GENERATION_WATCHDOG_SECONDS": "6"}
    with spawn(**settings) as (url, child):
        fault.write_text("hang")
        assert ask(url).status_code == 504
        assert child.poll() is None
        fault.unlink()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert ask(url).status_code == 200

        fault.write_text("hang")
        assert ask(url).status_code == 504
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    said(tmp_path)


@pytest.mark.parametrize("proxy", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_a_model_thread_that_dies_ends_the_process(spawn: Spawn, tmp_path: Path, proxy: str) -> None:
    fault = tmp_path / "fault"
    settings = {"ORACLE_FAULT": str(fault), "PROXY": proxy, "PROXY_PORT": "0", "LITELLM_MASTER_KEY": "sk-test"}
    with spawn(**settings) as (url, child):
        assert ask(url).status_code == 200
        fault.write_text("exit")
        answer = ask(url)
        assert answer.status_code == 500 and "died" in answer.json()["error"]["message"]
        assert child.wait(60) == 70
    assert "exit code 70" in said(tmp_path)


PIN = """{%- if messages[-1].content == "pin" -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- for c in range(99999) -%}
{%- endfor -%}{%- endfor -%}{%- endfor -%}{%- endif -%}"""
"""In front of a chat template: a worker that renders this never returns."""


def test_pinned_workers_held_bodies_and_unread_answers_do_not_keep_it(
    oracle_path: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(oracle_path("plain"), tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(PIN + template.read_text())
    hi, pin, long = ([{"role": "user", "content": text}] for text in ("hi", "pin", "[[long 3000]]"))
    with process(model, tmp_path, ORACLE_SLEEP_PER_STEP="0.01") as (url, child):
        open_ = [send_raw(url, hi, held=1) for _ in range(50)]
        open_ += [send_raw(url, long, max_tokens=3000, stream=each, **ENDLESS) for each in (True, False) * 2]
        until(lambda: httpx.get(f"{url}/health", timeout=20).json()["running"] == 4)
        open_ += [send_raw(url, pin) for _ in range(2)]
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0  # these workers never return
        for connection in open_:
            connection.close()
    assert "Traceback" not in said(tmp_path)


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as a terminal has it, for children too: tests that run under nohup ignore it, and so would a server."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.thorough
@pytest.mark.usefixtures("hangup")
def test_a_signal_while_loading_ends_the_process(spawn: Spawn, tmp_path: Path, number: signal.Signals) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with spawn(ready=False, ORACLE_HOLD_LOADING=str(hold)) as (url, child):
        until(lambda: _state(url) == "loading")
        until(lambda: (tmp_path / "hold.reached").exists())
        child.send_signal(number)
        assert child.wait(60) == 0  # what it loads never comes to an end
    said(tmp_path)


def _state(url: str) -> str:
    try:
        return str(httpx.get(f"{url}/health", timeout=20).json()["state"])
    except httpx.TransportError:
        return ""


@pytest.mark.slow
def test_a_signal_ends_a_server_that_is_at_work(oracle_path: Callable[..., Path], tmp_path: Path) -> None:
    with process(oracle_path("plain"), tmp_path, ORACLE_SLEEP_PER_STEP="0.05") as (url, child):
        answers: list[httpx.Response] = []
        content = [{"role": "user", "content": "[[long 3000]]"}]
        asking = threading.Thread(target=lambda: answers.append(ask(url, messages=content, max_tokens=5000, **ENDLESS)))
        asking.start()
        until(lambda: httpx.get(f"{url}/health").json()["running"] == 1)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
        asking.join(60)
        assert answers[0].status_code == 503
    said(tmp_path)
