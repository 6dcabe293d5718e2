"""A client that has gone is noticed, whatever it sent before it went. Both branches: Linux's poll, macOS' kqueue."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.api.http import watcher
from start_llm.api.http.watcher import is_gone
from start_llm.api.server import ApiServer
from start_llm.core.events import TextDelta
from tests.api.conftest import CHAT, PATH, Connect
from tests.api.fakes import FIRST, FakeService, hold

LATE = [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"x" * 200_000]


class Kqueue:
    """As macOS has it: a socket with unread bytes and an end behind them is readable, and its event says EOF."""

    def control(self, wanted: Sequence[Any], most: int, timeout: float) -> list[Any]:
        assert timeout == 0 and most == len(wanted)
        poller = select.poll()
        for event in wanted:
            poller.register(event.ident, select.POLLIN | select.POLLRDHUP)
        ends = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        return [SimpleNamespace(ident=fd, flags=1 | (0x8000 if found & ends else 0)) for fd, found in poller.poll(0)]

    def close(self) -> None:
        pass


KQUEUE = SimpleNamespace(
    kqueue=Kqueue,
    kevent=lambda ident, filter, flags: SimpleNamespace(ident=ident, filter=filter, flags=flags),
    KQ_FILTER_READ=-1,
    KQ_EV_ADD=1,
    KQ_EV_EOF=0x8000,
)


@pytest.fixture(params=["poll", "kqueue"])
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "poll" and not hasattr(select, "POLLRDHUP"):
        pytest.skip("this system has no POLLRDHUP")
    if request.param == "poll":
        monkeypatch.setattr(watcher, "ended", watcher._ended_by_poll)
        return
    if not hasattr(select, "kqueue"):
        monkeypatch.setattr(watcher, "_select", KQUEUE)
    monkeypatch.setattr(watcher, "ended", watcher._ended_by_kqueue)


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize("late", LATE, ids=len)
@pytest.mark.parametrize("stream", [True, False])
def test_late_bytes_do_not_hide_that_a_client_goes(
    server: ApiServer, service: FakeService, connect: Connect, late: bytes, stream: bool
) -> None:
    service.script = lambda request: [FIRST, TextDelta("a"), hold]
    raw = connect(server).post(PATH, CHAT | {"stream": stream})
    events = service.streams.get(timeout=60)
    raw.send(late)
    raw.close()
    assert events.closed.wait(60)


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize("late", LATE[:3], ids=len)
def test_only_who_has_ended_is_gone(late: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_gone(ours)
        theirs.send(late or b"x")
        assert not is_gone(ours)
        theirs.close()
        assert is_gone(ours)
        assert ours.recv(10) == (late or b"x")[:10]  # nothing was taken
    assert is_gone(ours)
    ours, theirs = socket.socketpair()
    with ours, theirs:  # half a connection is no client
        theirs.shutdown(socket.SHUT_WR)
        assert is_gone(ours)
