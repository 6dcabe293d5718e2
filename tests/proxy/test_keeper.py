"""A proxy that dies is started again, so many times and no more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from start_llm.core.settings import load_settings
from start_llm.proxy.keeper import ProxyKeeper
from start_llm.proxy.launcher import LiteLLMProxy, ProxyError


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


class Fake:
    """Dies as soon as it is started, except for the starts in `lives`."""

    url = "http://127.0.0.1:9"

    def __init__(self, lives: frozenset[int] = frozenset(), fails: bool = False) -> None:
        self.lives, self.fails = lives, fails
        self.starts = 0
        self.stops = 0
        self.killed = threading.Event()

    def alive(self) -> bool:
        return self.starts in self.lives and not self.killed.is_set()

    def healthy(self) -> bool:
        return self.alive()

    def start(self) -> None:
        self.starts += 1
        self.killed.clear()
        if self.fails:
            raise ProxyError("PROXY_PORT=1 is taken")

    def stop(self) -> None:
        self.stops += 1

    def log_tail(self, lines: int = 20) -> str:
        return "its last words"


def test_it_is_given_up_after_so_many_deaths_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    proxy = Fake()
    keeper = ProxyKeeper(proxy, lambda line: None, pauses=(0.0, 0.0, 0.0))
    keeper.start()
    until(lambda: "given up" in caplog.text)
    assert proxy.starts == 3 and keeper.figures() == {"proxy_up": 0.0, "proxy_restarts": 3.0}
    assert "(1 of 3)" in caplog.text and "its last words" in caplog.text
    keeper.stop()


def test_a_restart_that_fails_is_one_of_them(caplog: pytest.LogCaptureFixture) -> None:
    proxy = Fake(fails=True)
    keeper = ProxyKeeper(proxy, lambda line: None, pauses=(0.0, 0.0))
    keeper.start()
    until(lambda: "given up" in caplog.text)
    assert proxy.starts == 2 and "PROXY_PORT=1 is taken" in caplog.text
    keeper.stop()


def test_one_that_lived_long_has_all_its_restarts_again() -> None:
    proxy = Fake(lives=frozenset(range(5)))
    keeper = ProxyKeeper(proxy, lambda line: None, pauses=(0.0,), stable_seconds=0.0)
    keeper.start()
    for start in range(1, 4):
        proxy.killed.set()
        until(lambda start=start: proxy.starts == start and proxy.alive())  # type: ignore[misc]
    keeper.stop()
    assert keeper.figures() == {"proxy_up": 1.0, "proxy_restarts": 3.0} and proxy.stops == 3


def test_stop_ends_a_pause() -> None:
    proxy = Fake()
    keeper = ProxyKeeper(proxy, lambda line: None, pauses=(3600.0,))
    keeper.start()
    keeper.stop()
    assert proxy.starts == 0


def test_one_that_was_stopped_before_its_start_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    proxy = Fake()
    keeper = ProxyKeeper(proxy, lambda line: None, pauses=(0.0,))
    keeper.stop()
    keeper.start()
    keeper.stop()
    assert proxy.starts == 0 and caplog.text == ""


def test_a_killed_child_comes_back_on_its_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(None, proxy_port=0, start_llm_cache_dir=tmp_path / "cache", litellm_master_key="sk-t")
    said: list[str] = []
    proxy = LiteLLMProxy(settings, server_url="http://127.0.0.1:9", model_id="m", log_path=tmp_path / "proxy.log")
    proxy.start()
    keeper = ProxyKeeper(proxy, said.append, pauses=(0.0,))
    keeper.start()
    try:
        first, url = proxy.pid, proxy.url
        assert first is not None
        os.killpg(first, signal.SIGKILL)
        until(lambda: proxy.pid not in {None, first} and proxy.alive())
        assert proxy.url == url and keeper.figures() == {"proxy_up": 1.0, "proxy_restarts": 1.0}
        assert "the proxy has died" in caplog.text
        until(lambda: said == ["proxy     ready"], seconds=90)
    finally:
        keeper.stop()
        proxy.stop()
    assert not proxy.alive() and keeper.figures()["proxy_up"] == 0.0


def test_a_folder_that_cannot_be_written_is_a_proxy_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = load_settings(None, proxy_port=0, start_llm_cache_dir=tmp_path / "file", litellm_master_key="sk-t")
    log_path = tmp_path / "file" / "logs" / "proxy.log"
    proxy = LiteLLMProxy(settings, server_url="http://127.0.0.1:9", model_id="m", log_path=log_path)
    with pytest.raises(ProxyError, match=r"cannot be started: .*file"):
        proxy.start()
    assert not proxy.alive()
    proxy.stop()
