"""The page at `/`: what may be read by whom, and the feed that fills it."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import httpx
import pytest

from start_llm.api import server as serving
from start_llm.api.http import access
from start_llm.api.server import ApiServer
from start_llm.clients import CLIENTS
from start_llm.host.home import COMMAND_VARIABLE
from tests.api.conftest import CHAT, Connect, Serve
from tests.api.fakes import FakeService


@contextmanager
def feed(server: ApiServer, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The messages of a feed, as they come."""
    with httpx.stream("GET", f"{server.url}/page/feed", headers=headers, timeout=20) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line)


def ask(server: ApiServer, **headers: str) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ended_in(messages: Iterator[dict[str, Any]], count: int) -> list[str]:
    """The first `count` ended requests that a feed tells."""
    found: list[str] = []
    while len(found) < count:
        found += [entry["id"] for entry in next(messages)["ended"]]
    return found


def test_the_shell_has_no_data_and_lets_nothing_in(server: ApiServer) -> None:
    for path, kind in (("/", "text/html"), ("/page/start.js", "text/javascript"), ("/page/page.js", "text/javascript")):
        answer = httpx.get(server.url + path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert "http://" not in answer.text and "https://" not in answer.text, "nothing is fetched from elsewhere"
    assert httpx.get(f"{server.url}/page/page.html.jinja").status_code == 404
    shell, policy = (answer := httpx.get(server.url)).text, answer.headers["content-security-policy"]
    style = shell.partition("<style>")[2].partition("</style>")[0]
    assert b64encode(sha256(style.encode()).digest()).decode() in policy, "the browser takes this style and no other"
    assert '<link rel="stylesheet' not in shell and shell.count("<script") == 1, "nothing is fetched before the paint"
    assert "<script>" not in shell and " style=" not in shell and " onclick=" not in shell  # the policy forbids them
    assert all(f"start-llm launch {name}" in shell for name in CLIENTS)


def test_behind_a_proxy_and_on_another_machine_there_is_no_feed(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert httpx.get(f"{server.url}/page/feed", headers={"X-Forwarded-For": "192.0.2.1"}).status_code == 403
    monkeypatch.setattr(access, "is_loopback", lambda address: False)
    assert httpx.get(f"{server.url}/page/feed").status_code == 403


def test_commands_are_as_the_user_types_them(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "python3.12 install_and_run.py")
    shell = httpx.get(serve().url).text
    assert all(f"python3.12 install_and_run.py {words}" in shell for words in ("chat", "launch pi", "launch claude"))
    assert "start-llm " not in shell


def test_a_feed_tells_what_runs_and_what_has_ended(server: ApiServer, service: FakeService) -> None:
    before = ask(server)
    with feed(server) as messages:
        first = next(messages)
        assert [entry["id"] for entry in first["ended"]] == [before] and first["now"] == []
        assert first["server"]["health"]["ok"] and first["server"]["models"][0]["id"]
        after = ask(server)
        assert ended_in(messages, 1) == [after]


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_foreign_pages_get_nothing(server: ApiServer, headers: dict[str, str]) -> None:
    for path in ("/", "/page/feed"):
        assert httpx.get(server.url + path, headers=headers).status_code == 403


def test_pages_take_no_worker_and_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "FEED_THREADS", 2)
    server = serve(http_threads=2)
    with feed(server) as one, feed(server) as two:
        next(one), next(two)
        third = httpx.get(f"{server.url}/page/feed")
        assert third.status_code == 503 and "pages are open" in third.json()["detail"]
        made = ask(server)
        assert ended_in(one, 1) == ended_in(two, 1) == [made]


def test_a_head_of_a_feed_has_no_body(server: ApiServer, connect: Connect) -> None:
    raw = connect(server).get("/page/feed", method="HEAD")
    received = b"".join(iter(lambda: raw.socket.recv(65536), b""))  # it ends
    assert received.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in received
    assert received.endswith(b"\r\n\r\n") and received.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("http_threads", [1, 16])
def test_a_feed_goes_on_whatever_the_number_of_workers(serve: Serve, http_threads: int) -> None:
    server = serve(http_threads=http_threads)
    with feed(server, Authorization="Bearer one") as mine, feed(server, Authorization="Bearer two") as theirs:
        next(mine), next(theirs)
        made = ask(server, Authorization="Bearer one")
        assert ended_in(mine, 1) == [made]
        own = ask(server, Authorization="Bearer two")
        assert ended_in(theirs, 1) == [own]


def test_a_stop_ends_feeds(serve: Serve) -> None:
    server = serve()
    with feed(server) as messages:
        next(messages)
        assert server.stop(0.5)
        with pytest.raises((httpx.HTTPError, StopIteration)):
            while True:
                next(messages)
