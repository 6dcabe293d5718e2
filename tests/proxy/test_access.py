"""The gate by itself, in front of an application that records what gets through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp

from start_llm.core.errors import Unavailable
from start_llm.proxy.access import READY_BODY, ProxyAccess
from start_llm.proxy.asgi import error_answer

KEY = "sk-right"
GOOD = [(b"host", b"127.0.0.1:4000"), (b"authorization", b"Bearer sk-right")]


class Behind:
    """An ASGI application that reads the body and answers with CORS headers of its own, as LiteLLM does."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.more: list[tuple[bytes, bytes]] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.bodies.append(b"gone")
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        headers = [(b"content-type", b"text/plain"), (b"access-control-allow-origin", b"*"), *self.more]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"through"})


def sent_by(layer: ASGIApp, scope: Any, messages: list[Any]) -> list[Any]:
    """What it sends when it receives these messages."""
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(layer(scope, receive, send))
    return sent


def ask(
    behind: Behind, headers: Iterable[tuple[bytes, bytes]] = GOOD, names: Sequence[str] = (), **more: str
) -> tuple[int, dict[bytes, bytes], bytes]:
    gate = ProxyAccess(behind, key=KEY, names=names)
    waiting = [{"type": "http.request", "body": body, "more_body": body != b""} for body in (b"{}", b"")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": list(headers), **more}
    sent = sent_by(gate, scope, waiting)
    if not sent or "status" not in sent[0]:
        return 0, {}, b""
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent)


def test_the_right_key_passes_and_no_other_header_of_a_key_does() -> None:
    behind = Behind()
    extra = [(b"x-api-key", b"sk-right"), (b"authorization", b"Bearer sk-other"), (b"x-goog-api-key", b"g")]
    status, _, body = ask(behind, headers=[GOOD[0], *extra, (b"a", b"b")])
    assert (status, body) == (200, b"through") and behind.bodies == [b"{}"]
    assert behind.scopes[0]["headers"] == [GOOD[0], (b"a", b"b"), (b"authorization", b"Bearer sk-right")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"accept", b"*/*"),
        (b"authorization", b"Bearer "),
        (b"authorization", b"Bearer sk-righ"),
        (b"authorization", b"sk-right"),
        (b"x-api-key", b"\xff"),
        (b"x-goog-api-key", b"sk-right"),
    ],
)
def test_no_key_or_a_wrong_one(name: bytes, value: bytes) -> None:
    behind = Behind()
    status, answer, body = ask(behind, headers=[GOOD[0], (name, value)])
    assert status == 401 and answer[b"www-authenticate"] == b"Bearer" and not behind.scopes
    assert b"A valid API key is needed" in body


@pytest.mark.parametrize("more", [[], [(b"x-should-retry", b"false")], [(b"llm_provider-x-should-retry", b"false")]])
def test_sdks_are_told_not_to_send_again_what_is_not_supported(more: list[tuple[bytes, bytes]]) -> None:
    """Whether the server's own header has come through or LiteLLM has renamed it."""
    behind = Behind()
    behind.status, behind.more = 501, more
    assert ask(behind)[1][b"x-should-retry"] == b"false"
    behind.status, behind.more = 503, []
    assert b"x-should-retry" not in ask(behind)[1]


@pytest.mark.parametrize(
    ("host", "names", "status"),
    [
        ("localhost:4000", [], 200),
        ("evil.example", ["good.example"], 403),
        ("Good.example:4000", ["good.example"], 200),
        ("[", [], 400),
    ],
)
def test_hosts(host: str, names: list[str], status: int) -> None:
    assert ask(Behind(), headers=[(b"host", host.encode()), GOOD[1]], names=names)[0] == status
    assert ask(Behind(), headers=[GOOD[0], GOOD[0], GOOD[1]])[0] == ask(Behind(), headers=[GOOD[1]])[0] == 400


def test_a_page_reads_only_what_it_may() -> None:
    page = (b"origin", b"http://localhost:3000")
    _, answer, _ = ask(Behind(), headers=[*GOOD, page])
    assert answer[b"access-control-allow-origin"] == page[1]
    _, answer, _ = ask(Behind())
    assert b"access-control-allow-origin" not in answer
    for origin in (b"https://evil.example", b"null", b"http://localhost.evil.example"):
        behind = Behind()
        status, answer, _ = ask(behind, headers=[*GOOD, (b"origin", origin)])
        assert status == 403 and b"access-control-allow-origin" not in answer and not behind.scopes
    behind = Behind()
    status, answer, body = ask(behind, headers=[*GOOD, page, page])
    assert status == 400 and b"access-control-allow-origin" not in answer and not behind.scopes
    assert b"more than one Origin header" in body and b'"param": "Origin"' in body.replace(b'":"', b'": "')


def test_readiness_needs_no_key_and_says_nothing_of_what_is_behind() -> None:
    behind = Behind()
    assert ask(behind, headers=[GOOD[0]], method="GET", path="/health/readiness")[::2] == (200, READY_BODY)
    assert not behind.scopes


def test_there_are_no_web_sockets() -> None:
    behind = Behind()
    assert ask(behind, path="/v1/realtime", type="websocket")[0] == 0 and not behind.scopes


def test_start_and_stop_get_through() -> None:
    behind = Behind()
    ask(behind, type="lifespan")
    assert [scope["type"] for scope in behind.scopes] == ["lifespan"]


def test_errors_of_messages_are_in_their_dialect() -> None:
    _, _, body = ask(Behind(), path="/v1/messages", headers=GOOD[:1])
    assert b'"type": "error", "error": {"type": "authentication_error"' in body


def test_words_of_the_client_in_a_header_do_not_end_the_connection() -> None:
    """A header with a line break is none: the connection would close without an answer."""
    behind = Behind()
    behind.more = [(b"a", b"x\ny"), (b"b", b"x\r\nset-cookie: 1"), (b"c", b"\x00"), (b"d", b" x ")]
    behind.more += [(b"e", b"x y\xe9"), (b"f", b"")]
    status, answer, _ = ask(behind)
    assert status == 200
    assert {name: answer[name] for name in (b"e", b"f")} == {b"e": b"x y\xe9", b"f": b""}
    assert answer.keys().isdisjoint({b"a", b"b", b"c", b"d"})


def test_a_refusal_says_when_to_ask_again() -> None:
    answer = error_answer("/v1/messages", Unavailable("No node is left.", retry_after=3.0))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "3"
