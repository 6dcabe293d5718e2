"""Something else than a start_llm server answers at a node's address: nothing hangs, and no request fails."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from start_llm.core.settings import SettingsError, load_settings
from start_llm.proxy import nodes as module
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.nodes import MOST_BYTES, ServerNode, ask, cards_of, json_of, look_at, node_client, status_of
from tests.kinds import some
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.stub import send_json
from tests.proxy.test_config import with_tls
from tests.proxy.test_fleet import WAIT, body, on_nodes, pick, until, watched

ENDLESS = 10**400
COUNTS = ("running", "queued", "known", "known_seconds", "opening_seconds", "conversations", "revision")
GARBAGE = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00{",
    "a page": b"<html>It works!</html>",
    "deep": b"[" * 100_000,
    "a list": b"[1]",
    "long numbers": json.dumps({"state": "ready"} | dict.fromkeys((*COUNTS, "reused", "prompt"), ENDLESS)).encode(),
    "no numbers": b'{"state": "ready", "running": NaN, "known": -Infinity, "known_seconds": 1e999, "reused": []}',
    "a state of many words": json.dumps({"state": "<b>\n" * 1000, "detail": "x"}).encode(),
    "a state that is none": b'{"state": ["ready"]}',
    "cards of nothing": b'{"state": "busy", "data": [{"id": 5}, 7, {"id": "served", "details": 3}], "object": null}',
    "much": b'{"state": "ready", "more": "' + b"x" * (MOST_BYTES + 1) + b'"}',
    "loads that are none": b'{"state": "ready", "version": ["5"], "loads": [{"requests": {}, "num_used_tokens": "9"}]}',
    "loads of nothing": b'{"state": "ready", "loads": {"0": 1}}',
}
HEADS = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a place that is no address": b"HTTP/1.1 302 Found\r\nLocation: mailto:x\r\nContent-Length: 0\r\n\r\n",
    "a place with a name that is none": b"HTTP/1.1 302 Found\r\nLocation: http://xn--a/\r\nContent-Length: 0\r\n\r\n",
    "an encoding that unpacks": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=zlib_codec\r\n\r\n{}",
    "a wrong length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a wrong chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}
RECORD = b"\x17\x03\x03\x00\x20" + bytes(32)  # of TLS, not made with the connection's keys


def says(content: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def drips(head: bytes, piece: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """A byte or two at a time, for longer than anybody waits."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head)
        until_end = time.monotonic() + WAIT
        while time.monotonic() < until_end:
            handler.wfile.write(piece)
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize("invents", [False, True])
@on_nodes(1)
async def test_a_node_is_asked_about_a_model_that_talks_and_a_templates_own_text_is_no_lie(
    stubs: list[NodeStub], invents: bool
) -> None:
    ready = {"state": "ready"}
    cards = [{"id": "a-bge", "details": ready | {"kind": "embedding"}}, {"id": "served", "details": ready}]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        """The template begins with 1,000 tokens where a client sends no system text."""
        if handler.command == "GET":
            send_json(handler, {"data": cards})
            return
        given = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        own = 0 if given["messages"][0]["role"] == "system" else 1000
        known = given["model"] == "served"
        told = {"reused": 1600 if invents else own, "prompt": own + 800}
        send_json(handler, told if known else {}, 200 if known else 400)

    stubs[0].instead = answer
    fleet = NodeFleet([ServerNode(stubs[0].url)], {})
    member = fleet.members[stubs[0].name]
    until_end = time.monotonic() + WAIT
    while member.is_believed is invents or not member.models:
        assert await fleet._read_cards(member) and time.monotonic() < until_end
    assert member.loaded == {"a-bge", "served"}
    await fleet.client.aclose()


def begins(head: bytes, behind_tls: bytes = b"") -> Callable[[BaseHTTPRequestHandler], None]:
    """With these bytes, and hangs up. `behind_tls`: bytes that TLS does not know of."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.close_connection = True
        handler.wfile.write(head)
        os.write(handler.connection.fileno(), behind_tls)

    return answer


STRANGERS = {name: says(content) for name, content in GARBAGE.items()}
STRANGERS |= {name: begins(head) for name, head in HEADS.items()}


@pytest.mark.parametrize("stranger", some(STRANGERS, 8))
@on_nodes(3)
async def test_garbage_harms_nobody(stubs: list[NodeStub], stranger: str, caplog: pytest.LogCaptureFixture) -> None:
    """httpx parses a `Location` though it does not go there, and lets out what is wrong with it."""
    caplog.set_level(logging.WARNING)
    stubs[0].instead = STRANGERS[stranger]
    async with watched(stubs) as fleet:
        members = list(fleet.members.values())
        await until(lambda: all(member.loaded for member in members[1:]) and members[0].state != "unknown")
        members[0].state, members[0].loaded = "ready", frozenset({"served"})  # it is asked like the others
        assert await pick(fleet, body("new")) in fleet.members
        assert await fleet._look(members[0]) in {True, False}
        assert re.fullmatch(r"[a-z]+", members[0].state)
        with suppress(httpx.HTTPError):
            await ask(fleet.client, f"{stubs[0].url}/health")
    assert not any(record.exc_info for record in caplog.records), "a watcher failed"
    assert all("\n" not in record.getMessage() for record in caplog.records)
    told = await asyncio.to_thread(look_at, [ServerNode(stub.url) for stub in stubs[:2]])
    assert told[1]["state"] == "ready" and re.fullmatch(r"[a-z]+", told[0]["state"])
    assert stranger not in HEADS or told[0]["state"] != "ready"


@pytest.mark.parametrize("garbage", GARBAGE)
def test_loads_that_are_none_are_told_as_nothing(garbage: str) -> None:
    told = status_of("a", {"state": "ready"}, [], json_of(httpx.Response(200, content=GARBAGE[garbage])))
    assert (told.name, told.requests, told.stored_tokens) == ("a", 0, 0) and len(told.version) <= 40


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_tls_that_breaks_is_an_answer_that_failed(head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error is an OSError: `start-llm nodes` must tell it as the node's."""
    with nodes(1) as [stub]:
        stub.instead = begins(head, RECORD)
        node, certificate = with_tls(stub, tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        [found] = look_at([node])
        assert found["state"] == "gone" and "cannot be read" in found["detail"]


def test_models_without_an_end_are_left_out() -> None:
    answer = httpx.Response(200, json={"data": [{"id": "x" * 2000}, *({"id": str(number)} for number in range(5000))]})
    assert [card["id"] for card in cards_of(answer)] == [str(number) for number in range(999)]


@pytest.mark.parametrize("part", ["head", "body"])
@on_nodes(1)
async def test_an_answer_that_drips_ends_and_keeps_no_connection(
    stubs: list[NodeStub], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx looks at the time between two pieces only."""
    monkeypatch.setattr(module, "_SLACK_SECONDS", 0.0)
    head = b"HTTP/1.1 200 OK\r\n" + (b"x-a: " if part == "head" else b"Content-Length: 99999\r\n\r\n")
    stubs[0].instead = drips(head, b"x")
    async with node_client() as client:
        asking = asyncio.create_task(ask(client, f"{stubs[0].url}/health", seconds=0.3))
        with pytest.raises(httpx.ReadTimeout):
            await asyncio.wait_for(asking, WAIT / 2)
        pool = client._transport._pool  # type: ignore[attr-defined]
        assert all(connection.is_idle() or connection.is_closed() for connection in pool.connections)


@pytest.mark.parametrize(
    ("content", "headers", "why"),
    [
        (GARBAGE["much"], {}, f"more than {MOST_BYTES} bytes"),
        (gzip.compress(b" " * 2**24), {"Content_Encoding": "gzip"}, "packed"),
    ],
    ids=["long", "packed"],
)
@on_nodes(1)
async def test_what_is_too_long_or_packed_is_not_read(
    stubs: list[NodeStub], content: bytes, headers: dict[str, str], why: str
) -> None:
    stubs[0].instead = says(content, **headers)
    async with node_client() as client:
        assert client.headers["accept-encoding"] == "identity"
        with pytest.raises(httpx.RemoteProtocolError, match=why):
            await ask(client, f"{stubs[0].url}/health")


@on_nodes(1)
async def test_a_node_stores_nothing_with_the_proxy(stubs: list[NodeStub]) -> None:
    """A cookie of one client's answer would come with another client's request."""
    stubs[0].instead = says(b"{}", Set_Cookie="who=me; Path=/")
    async with node_client() as client:
        for _ in range(2):
            await ask(client, f"{stubs[0].url}/health")
    assert stubs[0].cookies == []


@on_nodes(1)
async def test_a_node_that_does_not_take_the_key_is_never_ready(stubs: list[NodeStub]) -> None:
    """`/health` wants no key. A request that came before the models were asked for got the node's 401."""
    seen = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(fleet.members[stubs[0].name].state)
        stubs[0]._get(handler)

    fleet = NodeFleet([ServerNode(stub.url, "key") for stub in stubs], {})
    stubs[0].mode, stubs[0].instead = "locked", answer
    member = fleet.members[stubs[0].name]
    for _ in range(3):
        assert not await fleet._look(member)
    assert member.state == "refused" and set(seen) == {"unknown", "refused"}
    stubs[0].mode = "ok"
    assert await fleet._look(member) and member.state == "ready"
    await fleet.client.aclose()


@pytest.mark.parametrize("name", ["API_KEY", "NODES_API_KEY", "LITELLM_MASTER_KEY"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(name: str) -> None:
    """`h11` writes such a header into its error, and that stood in `start-llm nodes`."""
    for key in ("sk-secret\n", " sk-secret", "sk-\x00secret"):
        with pytest.raises(SettingsError, match=f"{name}=.*without line breaks") as found:
            load_settings(None, **{name.lower(): key})
        assert "secret" not in str(found.value)


def test_a_key_may_have_any_letters() -> None:
    with nodes(1) as stubs:
        assert look_at([ServerNode(stubs[0].url, load_settings(None, nodes_api_key="sécret").nodes_api_key or "")])
        assert {key.encode("latin-1").decode() for key in stubs[0].keys} == {"sécret"}


def test_a_question_lives_on_when_its_client_has_left() -> None:
    """The event loop holds tasks weakly only: what nobody holds may be collected in the middle."""

    async def test() -> None:
        fleet = NodeFleet([], {})
        begun = asyncio.Event()
        asking = asyncio.create_task(begun.wait())
        waiting = asyncio.create_task(fleet._done_within([asking], WAIT))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert asking in fleet._late and not asking.cancelled()
        begun.set()
        await asyncio.wait([asking])
        await asyncio.sleep(0)
        assert not fleet._late

    asyncio.run(test())
