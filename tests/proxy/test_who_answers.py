"""The balancer's loop without LiteLLM: an application that answers as LiteLLM would, in front of nodes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from start_llm.core.jsontext import LARGE
from start_llm.core.settings import load_settings
from start_llm.proxy.config import names_behind, proxy_config
from start_llm.proxy.fleet import NODE_HEADER, SILENT_SECONDS, NodeFleet
from start_llm.proxy.nodes import ServerNode
from start_llm.proxy.routing import RouteKey, route_key
from tests.kinds import some
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.stub import CARD, TEXT
from tests.proxy.test_fleet import on_nodes
from tests.proxy.test_hostile_nodes import GARBAGE, HEADS, begins
from tests.proxy.test_hostile_nodes import says as says_garbage

ENTRY = {"model_name": "served", "litellm_params": {"model": "openai/served", "timeout": 60}}
CONFIG = {"model_list": [ENTRY | {"model_info": {"id": "served"}}]}
BODY = {"model": "served", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class Loop:
    """The balancer, and in place of LiteLLM what a test sets as `litellm`.

    Attributes:
        outcome: of the request that is asked now.
    """

    def __init__(self, stubs: list[NodeStub]) -> None:
        outcomes = import_module("start_llm.proxy.outcome")
        self.outcome: Callable[[], Any] = outcomes.current.get
        self.fleet = NodeFleet([ServerNode(stub.url) for stub in stubs], {})
        self.server = import_module("start_llm.proxy.passthrough").ServerRoutes(CONFIG, self.fleet, {})
        self.litellm: Callable[[Scope, Receive, Send], Any] = self.forward
        balancer = import_module("start_llm.proxy.balancer").Balancer
        self._ask = balancer(self._app, fleet=self.fleet, holders={}, server=self.server)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.litellm(scope, receive, send)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.server.forward(Request(scope, receive))
        await response(scope, receive, send)

    async def asked(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._ask)) as client:
            answer = await client.post(f"http://127.0.0.1{path}", json=body)
        await self.fleet.client.aclose()
        return answer


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM fetches it when it is imported


def asked(stubs: list[NodeStub], path: str, body: dict[str, Any], litellm: Any = None) -> httpx.Response:
    async def run() -> httpx.Response:
        loop = Loop(stubs)
        for stub in stubs[1:]:  # the first one is asked first
            loop.fleet.members[stub.name].running = 50
        loop.litellm = loop.forward if litellm is None else lambda *given: litellm(loop, *given)
        return await asyncio.wait_for(loop.asked(path, body), 60)

    return asyncio.run(run())


async def says(send: Send, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def faulty(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
    await says(send, 500, b"a fault of LiteLLM's")


HALF = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"


@pytest.mark.parametrize(("count", "head"), [(1, HALF), (2, HALF), *((2, head) for head in list(HEADS.values())[:3])])
def test_a_node_that_sends_a_head_and_no_body_or_what_nobody_understands_has_not_answered(
    count: int, head: bytes
) -> None:
    with nodes(count) as stubs:
        stubs[0].instead = begins(head)
        answers = [asked(stubs, "/v1/embeddings", {"model": "served", "input": str(number)}) for number in range(4)]
    assert {answer.status_code for answer in answers} == {200 if count == 2 else 503}
    assert count == 1 or all(answer.headers[NODE_HEADER].startswith(stubs[1].name) for answer in answers)


@pytest.mark.parametrize("dialect", ["chat/completions", "messages", "responses"])
def test_a_stream_past_litellm_that_breaks_ends_with_an_error_event(dialect: str) -> None:
    body = BODY if dialect != "responses" else {"model": "served", "stream": True, "input": "hi"}
    with nodes(1) as stubs:
        whole = asked(stubs, f"/v1/{dialect}", body, faulty)
        stubs[0].mode = "cut"
        stubs[0].was_read.set()
        answer = asked(stubs, f"/v1/{dialect}", body, faulty)
    assert (whole.status_code, answer.status_code) == (200, 200)
    assert TEXT in whole.text and b"broke before its answer was complete" not in whole.content
    assert b"broke before its answer was complete" in answer.content
    end = {"chat/completions": b"data: [DONE]\n\n", "messages": b"event: error", "responses": b"event: response.failed"}
    assert end[dialect] in answer.content


def test_a_node_that_says_it_has_no_room_is_not_asked_twice() -> None:
    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = loop.outcome()
        if outcome.node == stubs[1].name:
            await says(send, 200, b'{"from": "the other one"}')
            return
        outcome.failed, outcome.status = True, 503  # a page for people, which says nothing to LiteLLM
        await says(send, 503, b"no room")

    with nodes(2) as stubs:
        answer = asked(stubs, "/v1/chat/completions", BODY, litellm)
        assert answer.content == b'{"from": "the other one"}' and not stubs[0].seen


def test_a_node_that_is_frozen_is_given_up_past_litellm_too() -> None:
    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        loop.fleet.members[stubs[0].name].silent_seconds = SILENT_SECONDS + 1
        await faulty(loop, scope, receive, send)

    with nodes(2) as stubs:
        stubs[0].mode = "frozen"
        answer = asked(stubs, "/v1/chat/completions", BODY, litellm)
    assert TEXT in answer.text and answer.headers[NODE_HEADER].startswith(stubs[1].name)


def test_what_litellm_fails_on_has_the_servers_own_error() -> None:
    with nodes(1) as stubs:
        stubs[0].mode = "full"
        answer = asked(stubs, "/v1/chat/completions", BODY, faulty)
    assert answer.status_code == 429 and b"64 requests are waiting already." in answer.content


@pytest.mark.parametrize("known", [True, False])
def test_what_one_node_refuses_and_no_other_one_can_answer_is_503(known: bool) -> None:
    """`known`: that the other node is gone is known before it is asked."""

    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = loop.outcome()
        outcome.failed = True
        if outcome.node == stubs[1].name:
            outcome.is_lost = outcome.is_unsent = True
            await says(send, 500, b"it is gone")
        else:
            loop.fleet.members[stubs[1].name].state = "gone" if known else "ready"
            outcome.reason, outcome.status, outcome.error = "queue_full", 429, {"message": "full"}
            await says(send, 429, b'{"error": {"message": "full"}}')

    with nodes(2) as stubs:
        answer = asked(stubs, "/v1/chat/completions", BODY, litellm)
    assert answer.status_code == 503


def test_an_answer_that_is_no_stream_ends_a_row_of_failures() -> None:
    fleets: list[NodeFleet] = []

    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        fleets.append(loop.fleet)
        for member in loop.fleet.members.values():
            member.failures = 3
        await says(send, 200, b"{}")

    with nodes(2) as stubs:
        asked(stubs, "/v1/chat/completions", BODY | {"stream": False}, litellm)
    assert sorted(member.failures for member in fleets[0].members.values()) == [0, 3]


def test_what_a_given_up_node_still_says_is_in_no_answer() -> None:
    """What is cancelled may tidy up and say something on its way out, when another node has been asked."""
    names: list[str] = []

    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        names.append(loop.outcome().node)
        if len(names) > 1:
            await says(send, 200, b"good")
            return
        loop.fleet.gives_up = lambda name, tried, **_: len(names) == 1  # type: ignore[method-assign]
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await says(send, 200, b"stale")

    with nodes(2) as stubs:
        answer = asked(stubs, "/v1/chat/completions", BODY | {"stream": False}, litellm)
    assert answer.content == b"good" and len(set(names)) == 2


@pytest.mark.parametrize("size", [0, LARGE])
def test_a_large_body_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """All requests of the proxy share the loop."""
    readers: list[int] = []

    def read(*given: Any) -> RouteKey:
        readers.append(threading.get_ident())
        return route_key(*given)

    monkeypatch.setattr(import_module("start_llm.proxy.balancer"), "route_key", read)
    body = BODY | {"messages": [{"role": "user", "content": "x" * size}]}
    with nodes(2) as stubs:
        assert asked(stubs, "/v1/chat/completions", body).status_code == 200
    assert [reader == threading.get_ident() for reader in readers] == [size == 0]


# --- what is said of the servers' models ----------------------------------------


def abilities_of(card: dict[str, Any]) -> Any:
    return import_module("start_llm.proxy.passthrough")._abilities_of(card)


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"details": None, "capabilities": {"tools": True}},
        {"capabilities": None, "context_length": 4096},
        {"capabilities": {}, "context_length": "many"},
    ],
)
def test_a_node_that_says_too_little_of_a_model_breaks_nothing(card: dict[str, Any]) -> None:
    assert abilities_of(card) == {}


def test_what_a_card_says_is_told_in_litellms_words() -> None:
    told = abilities_of({"capabilities": {"tools": True}, "context_length": 4096})
    assert told["mode"] == "chat" and 4096 in told.values()
    assert abilities_of({"details": {"task": "speech"}}) == {"mode": "audio_speech"}


def test_a_name_that_the_server_does_not_know_is_made_its_main_models() -> None:
    from start_llm.proxy.passthrough import ServerRoutes

    with nodes(1) as [back]:
        settings = load_settings(None, proxy_model_id="mine")
        config = proxy_config(settings, server_url=back.url, model_id="mine", master_key="k", card=CARD)
        fleet = NodeFleet([ServerNode(back.url)], names_behind(config))
        listed = json.loads(asyncio.run(ServerRoutes(config, fleet, {}).models(None)).body)  # type: ignore[arg-type]
    assert [card["id"] for card in listed["data"]] == ["mine", "served"]


@pytest.mark.parametrize("garbage", some(GARBAGE, 5))
@on_nodes(3)
async def test_models_of_the_others_are_listed(stubs: list[NodeStub], garbage: str) -> None:
    stubs[0].instead = says_garbage(GARBAGE[garbage])
    loop = Loop(stubs)
    for member in loop.fleet.members.values():
        member.state = "ready"
    listed = json.loads((await loop.server.models(None)).body)
    assert "served" in [card["id"] for card in listed["data"]]
    assert (await loop.server.info(SimpleNamespace(query_params={}))).status_code == 200
    await loop.fleet.client.aclose()


def test_a_header_that_is_no_ascii_stays_behind() -> None:
    """Starlette writes headers in latin-1, and fails at others."""
    answer = httpx.Response(200, headers={b"x-a": "日".encode(), b"x-b": b"b", b"date": b"now"})
    assert import_module("start_llm.proxy.passthrough")._headers(answer) == {"x-b": "b"}


@pytest.mark.parametrize(
    ("tail", "ends"),
    [
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', True),
        (b"event: message_stop\ndata: {}\n\n", True),
        (b'data: {"error": {"message": "m"}}\n\n', True),
        (b'data: {"choices": [{"delta": {"content": "say data: [DONE] and event: error"}}]}\n\n', False),
        (b'data: {"delta": "an \\"error": {"}\n\n', False),
    ],
)
def test_the_models_words_are_no_end_of_a_stream(tail: bytes, ends: bool) -> None:
    assert bool(import_module("start_llm.proxy.balancer")._ENDS.search(tail)) is ends
