"""The balancer's loop without LiteLLM: an application that answers as LiteLLM would, in front of nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from start_llm.proxy.asgi import replay
from start_llm.proxy.fleet import NODE_HEADER, SILENT_SECONDS, NodeFleet
from start_llm.proxy.nodes import ServerNode
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.stub import TEXT

CONFIG = {"model_list": [{"model_name": "served", "litellm_params": {"model": "openai/served", "timeout": 60}}]}
BODY = {"model": "served", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class Answer:
    """A `Send` that keeps what a client gets."""

    def __init__(self) -> None:
        self.status, self.body, self.is_whole = 0, b"", False
        self.headers: dict[str, str] = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)


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

    async def asked(self, path: str, body: dict[str, Any]) -> Answer:
        raw, answer = json.dumps(body).encode(), Answer()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "asgi": {}}
        scope |= {"scheme": "http", "server": ("127.0.0.1", 1)}
        await self._ask(scope, replay(raw, _nothing_more), answer)
        await self.fleet.client.aclose()
        return answer


async def _nothing_more() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM fetches it when it is imported


def asked(stubs: list[NodeStub], path: str, body: dict[str, Any], litellm: Any = None) -> Answer:
    async def run() -> Answer:
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


def only_a_head(handler: BaseHTTPRequestHandler) -> None:
    handler.rfile.read(int(handler.headers["Content-Length"]))
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n")


@pytest.mark.parametrize("count", [1, 2])
def test_a_node_that_sends_a_head_and_no_body_has_not_answered(count: int) -> None:
    with nodes(count) as stubs:
        stubs[0].instead = only_a_head
        answers = [asked(stubs, "/v1/embeddings", {"model": "served", "input": str(number)}) for number in range(4)]
    assert all(answer.is_whole for answer in answers)
    assert {answer.status for answer in answers} == {200 if count == 2 else 503}
    assert count == 1 or all(answer.headers[NODE_HEADER].startswith(stubs[1].name) for answer in answers)


@pytest.mark.parametrize("dialect", ["chat/completions", "messages", "responses"])
def test_a_stream_past_litellm_that_breaks_ends_with_an_error_event(dialect: str) -> None:
    body = BODY if dialect != "responses" else {"model": "served", "stream": True, "input": "hi"}
    with nodes(1) as stubs:
        whole = asked(stubs, f"/v1/{dialect}", body, faulty)
        stubs[0].mode = "cut"
        stubs[0].was_read.set()
        answer = asked(stubs, f"/v1/{dialect}", body, faulty)
    assert (whole.status, answer.status) == (200, 200) and whole.is_whole and answer.is_whole
    assert TEXT in whole.body.decode() and b"broke before its answer was complete" not in whole.body
    assert b"broke before its answer was complete" in answer.body
    end = {"chat/completions": b"data: [DONE]\n\n", "messages": b"event: error", "responses": b"event: response.failed"}
    assert end[dialect] in answer.body


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
        assert answer.body == b'{"from": "the other one"}' and not stubs[0].seen


def test_a_node_that_is_frozen_is_given_up_past_litellm_too() -> None:
    async def litellm(loop: Loop, scope: Scope, receive: Receive, send: Send) -> None:
        loop.fleet.members[stubs[0].name].silent_seconds = SILENT_SECONDS + 1
        await faulty(loop, scope, receive, send)

    with nodes(2) as stubs:
        stubs[0].mode = "frozen"
        answer = asked(stubs, "/v1/chat/completions", BODY, litellm)
    assert TEXT in answer.body.decode() and answer.headers[NODE_HEADER].startswith(stubs[1].name)


def test_what_litellm_fails_on_has_the_servers_own_error() -> None:
    with nodes(1) as stubs:
        stubs[0].mode = "full"
        answer = asked(stubs, "/v1/chat/completions", BODY, faulty)
    assert answer.status == 429 and b"64 requests are waiting already." in answer.body


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
    assert answer.status == 503 and answer.is_whole
