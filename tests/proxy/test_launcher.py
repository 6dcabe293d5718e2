"""The proxy's life: readiness, ports, the end of it however the server ends, and the process that LiteLLM runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from start_llm.core.settings import load_settings
from start_llm.host.home import python_path
from start_llm.host.ports import free_port, who_listens
from start_llm.proxy import launcher
from start_llm.proxy.child import MODULE
from start_llm.proxy.launcher import LiteLLMProxy, ProxyError
from tests.proxy.stub import CARD
from tests.waiting import until

pytestmark = pytest.mark.live

Listener = tuple[int, int, subprocess.Popen[str]]
"""A stranger: (port, pid, process)."""

LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
OWNER = """
import pathlib, sys
from tests.proxy.test_launcher import make

proxy = make(pathlib.Path(sys.argv[1]))
proxy.start()
print(proxy.pid, flush=True)
sys.stdin.read()
"""


def make(folder: Path, port: int = 0, **more: str) -> LiteLLMProxy:
    given = {"proxy_port": port, "start_llm_cache_dir": folder / "cache", "litellm_master_key": "sk-t"}
    settings = load_settings(None, **given, **more)
    return LiteLLMProxy(
        settings, server_url="http://127.0.0.1:9", model_id="m", card=CARD, log_path=folder / "proxy.log"
    )


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Its command line claims to be a proxy on whatever port it is given."""
    port = free_port("127.0.0.1")
    code = LISTENER.replace('"127.0.0.1", 0', f'"127.0.0.1", {port}')
    command = [sys.executable, "-c", code, MODULE, "--port", str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield port, process.pid, process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def test_a_stranger_on_the_port_is_named_and_left_alone(tmp_path: Path, listener: Listener) -> None:
    port, pid, process = listener
    with pytest.raises(ProxyError, match=rf"PROXY_PORT={port} is taken by process {pid} .*python"):
        make(tmp_path, port).start()
    assert process.poll() is None


def test_the_proxy_of_another_server_is_called_that(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "who_listens", lambda port: f"process 1 ({MODULE})")
    monkeypatch.setattr(launcher, "_STOP_SECONDS", 0)
    with pytest.raises(ProxyError, match=r"taken by the proxy of another start_llm server\. .* PROXY_PORT=0 "):
        make(tmp_path, listener[0]).start()


@pytest.mark.parametrize("seen", [True, False])
def test_a_proxy_of_ours_that_ends_is_waited_for(
    seen: bool, tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has ended a moment ago. It may be gone before it is found among the processes."""
    port, pid, process = listener

    def whose(asked: int) -> str:
        process.kill()
        if seen:
            return f"process {pid} ({MODULE})"
        process.wait(60)
        return who_listens(asked)

    monkeypatch.setattr(launcher, "who_listens", whose)
    proxy = make(tmp_path, port)
    proxy.start()
    try:
        assert proxy.alive() and proxy.pid != pid and proxy.url == f"http://127.0.0.1:{port}"
    finally:
        proxy.stop()


def test_nodes_are_asked_past_the_machines_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see their keys and all conversations."""
    monkeypatch.setenv("HTTP_PROXY", "http://squid:3128")
    proxy = make(tmp_path, nodes="http://mac-2:8080", nodes_api_key="sk-node")
    proxy.start()
    try:
        assert proxy.pid is not None
        past = until(psutil.Process(proxy.pid).environ)  # empty while the child's program is being put in place
    finally:
        proxy.stop()
    assert past["HTTP_PROXY"] == "http://squid:3128" and "mac-2" in past["NO_PROXY"].split(",")


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    proxy = make(tmp_path)
    proxy.start()
    pid = proxy.pid
    assert pid is not None and proxy.alive() and not proxy.wait_ready(0)
    folder = Path(psutil.Process(pid).cwd())
    assert folder.is_dir()
    proxy.stop()
    assert gone(pid) and not folder.exists() and not proxy.alive()
    proxy.stop()


def test_wait_ready_ends_when_the_process_has_ended(tmp_path: Path) -> None:
    proxy = make(tmp_path)
    proxy.start()
    assert proxy.pid is not None
    os.killpg(proxy.pid, signal.SIGKILL)
    assert not proxy.wait_ready(60)
    proxy.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_server(tmp_path: Path, how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdin is not None
    pid = int(owner.stdout.readline())
    folder = Path(psutil.Process(pid).cwd())
    owner.send_signal(how)
    owner.wait()
    until(lambda: gone(pid))
    assert not folder.exists()
    owner.stdout.close()
    owner.stdin.close()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": python_path(), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_it_watches_its_server_before_litellm_is_imported() -> None:
    run = python(
        "-c", f"import sys, {MODULE}; print(sorted({{'litellm', 'fastapi', 'pydantic', 'mlx'}} & set(sys.modules)))"
    )
    assert run.stdout == "[]\n", run.stderr


def test_it_must_lead_its_own_process_group() -> None:
    """It ends its whole group."""
    run = python("-m", MODULE, "0", "/nowhere", "--")
    assert run.returncode != 0 and "must lead its own process group" in run.stderr
