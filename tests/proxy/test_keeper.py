"""A proxy that dies is started again, so many times and no more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from start_llm.proxy import keeper as keeper_module
from start_llm.proxy import launcher
from start_llm.proxy.keeper import ProxyKeeper
from start_llm.proxy.launcher import ProxyError
from tests.proxy.test_launcher import make
from tests.waiting import until


class Fake:
    """Dies as soon as it is started, except for the starts in `lives`."""

    url = "http://127.0.0.1:9"

    def __init__(self, lives: frozenset[int] = frozenset(), fails: bool = False) -> None:
        self.lives, self.fails = lives, fails
        self.starts = 0
        self.stops = 0
        self.trims = 0
        self.ready = threading.Event()
        self.ready.set()
        self.killed = threading.Event()

    def alive(self) -> bool:
        return self.starts in self.lives and not self.killed.is_set()

    def healthy(self) -> bool:
        return self.alive() and self.ready.is_set()

    def start(self) -> None:
        self.starts += 1
        self.killed.clear()
        if self.fails:
            raise ProxyError("PROXY_PORT=1 is taken")

    def stop(self) -> None:
        self.stops += 1

    def log_tail(self, lines: int = 20) -> str:
        return "its last words"

    def trim_log(self) -> None:
        self.trims += 1


Keep = Callable[..., ProxyKeeper]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """A keeper with other limits."""

    def made(proxy: Any, say: Callable[[str], None], **limits: Any) -> ProxyKeeper:
        for name, value in limits.items():
            monkeypatch.setattr(keeper_module, name.upper(), value)
        return ProxyKeeper(proxy, say)

    return made


@pytest.mark.parametrize(("fails", "said"), [(False, "its last words"), (True, "PROXY_PORT=1 is taken")])
def test_it_is_given_up_after_so_many_deaths_in_a_row(
    keep: Keep, caplog: pytest.LogCaptureFixture, fails: bool, said: str
) -> None:
    """A restart that fails is one of them."""
    proxy = Fake(fails=fails)
    keeper = keep(proxy, lambda line: None, pauses=(0.0, 0.0, 0.0))
    keeper.start()
    until(lambda: "given up" in caplog.text)
    assert proxy.starts == 3 and keeper.figures()["proxy_up"] == 0.0
    assert fails or (keeper.figures()["proxy_restarts"] == 3.0 and "(1 of 3)" in caplog.text)
    assert said in caplog.text
    keeper.stop()


def test_one_that_lived_long_has_all_its_restarts_again(keep: Keep) -> None:
    proxy = Fake(lives=frozenset(range(5)))
    keeper = keep(proxy, lambda line: None, pauses=(0.0,), stable_seconds=0.0)
    keeper.start()
    for start in range(1, 4):
        proxy.killed.set()
        until(lambda start=start: proxy.starts == start and proxy.alive())  # type: ignore[misc]
    keeper.stop()
    assert keeper.figures() == {"proxy_up": 1.0, "proxy_restarts": 3.0} and proxy.stops == 3


@pytest.mark.parametrize("begun", [True, False])
def test_one_that_is_stopped_in_a_pause_or_before_its_start_starts_nothing(
    keep: Keep, caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    proxy = Fake()
    keeper = keep(proxy, lambda line: None, pauses=(3600.0 if begun else 0.0,))
    if not begun:
        keeper.stop()
    keeper.start()
    keeper.stop()
    assert proxy.starts == 0 and (begun or caplog.text == "")


CHILD = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
words = sys.argv
http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Answer).serve_forever()
"""
"""In LiteLLM's place, which takes ten seconds to start."""


@pytest.mark.live
def test_a_killed_child_comes_back_on_its_port(
    keep: Keep, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(CHILD)
    monkeypatch.setattr(launcher, "MODULE", "stand_in")
    monkeypatch.setattr(launcher, "python_path", lambda: str(tmp_path))
    said: list[str] = []
    proxy = make(tmp_path)
    proxy.start()
    keeper = keep(proxy, said.append, pauses=(0.0,))
    keeper.start()
    try:
        first, url = proxy.pid, proxy.url
        assert first is not None
        os.killpg(first, signal.SIGKILL)
        until(lambda: proxy.pid not in {None, first} and proxy.alive())
        assert proxy.url == url and keeper.figures() == {"proxy_up": 1.0, "proxy_restarts": 1.0}
        assert "the proxy has died" in caplog.text
        until(lambda: said == ["proxy     ready"])
    finally:
        keeper.stop()
        proxy.stop()
    assert not proxy.alive() and keeper.figures()["proxy_up"] == 0.0


def test_ready_is_said_however_late_and_once(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    proxy = Fake(lives=frozenset({0}))
    proxy.ready.clear()
    said: list[str] = []
    keeper = keep(proxy, said.append, ready_seconds=0.0)
    keeper.start()
    until(lambda: "is not ready after" in caplog.text)
    proxy.ready.set()
    until(lambda: said == ["proxy     ready"])
    time.sleep(0.6)
    keeper.stop()
    assert said == ["proxy     ready"] and caplog.text.count("is not ready after") == 1


@pytest.mark.parametrize("announced", [False, True])
def test_ready_is_said_unless_it_was(keep: Keep, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it came between the end of the start-up's wait and the keeper's first look."""
    monkeypatch.setattr(keeper_module, "TRIM_SECONDS", 0.0)
    proxy = Fake(lives=frozenset({0}))
    said: list[str] = []
    keeper = keep(proxy, said.append)
    keeper.start(announced=announced)
    until(lambda: proxy.trims >= 2)
    keeper.stop()
    assert said == ([] if announced else ["proxy     ready"])


@pytest.mark.live
def test_folders_that_cannot_be_written_cost_the_log_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    proxy = make(tmp_path / "file")
    proxy.start()
    assert proxy.alive() and proxy.log_tail() == ""
    proxy.stop()
