"""NODES: the real LiteLLM in front of three nodes that answer, refuse, break and freeze."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from start_llm.core.settings import load_settings
from start_llm.proxy.fleet import NODE_HEADER
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.real_proxy import DIALECTS, body_of, client_of, running
from tests.proxy.stub import TEXT, responses_body
from tests.unique import unique
from tests.waiting import until

WAIT = 120.0
pytestmark = [pytest.mark.timeout(500), pytest.mark.thorough]
MOST_ANSWER_MEBIBYTES = 64  # what the proxy reads of an answer that is no stream
KEYS = ("node-key-of-this-server", "node-key-of-the-others")


@pytest.fixture(scope="module")
def stubs() -> Iterator[list[NodeStub]]:
    with nodes(3) as made:
        made[2].models.append("only-here")
        yield made


@pytest.fixture(scope="module")
def web(stubs: list[NodeStub], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("nodes")
    others = ",".join(stub.url for stub in stubs[1:])
    given = {"start_llm_cache_dir": folder / "cache", "api_key": KEYS[0], "nodes": others, "nodes_api_key": KEYS[1]}
    settings = load_settings(None, proxy_port=0, sse_ping_seconds=0.5, **given)
    with running(settings, stubs[0].url, folder, "served") as proxy, client_of(proxy, WAIT) as client:
        yield client


def ask(web: httpx.Client, dialect: str, text: str = "", **more: Any) -> httpx.Response:
    return web.post(dialect, json=body_of(dialect, text or unique(), **({"model": "served"} | more)))


def node_of(answer: httpx.Response) -> str:
    """Who answered: where a sign of life went out first, the head names who was asked first, a comment who it was."""
    return (told_late(answer) or answer.headers[NODE_HEADER]).partition(";")[0]


def told_late(answer: httpx.Response) -> str:
    return answer.text.partition(f": {NODE_HEADER}: ")[2].partition(";")[0]


def wait_for_looks(stubs: list[NodeStub]) -> None:
    """Until the proxy knows what each node says of itself now: it asks again only once it has read an answer."""
    looks = [stub.looks for stub in stubs]
    until(lambda: all(stub.looks >= before + 2 for stub, before in zip(stubs, looks, strict=True)))


@pytest.fixture
def first(web: httpx.Client, stubs: list[NodeStub]) -> NodeStub:
    """The node that new conversations go to: the others say that they are busy."""
    for stub in stubs:
        stub.reset()
        stub.running = 0 if stub is stubs[1] else 50
    wait_for_looks(stubs)
    until(lambda: node_of(ask(web, "chat/completions")) == stubs[1].name)
    for stub in stubs:
        stub.seen.clear()
    return stubs[1]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_to_one_node(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, dialect: str, stream: bool
) -> None:
    text = unique()
    for _ in range(3):
        answer = ask(web, dialect, text, stream=stream)
        assert answer.status_code == 200 and TEXT in answer.text and node_of(answer) == first.name
    first.running, stubs[0].running = 50, 0
    wait_for_looks(stubs)
    assert node_of(ask(web, dialect, text, stream=stream)) == first.name
    assert [len(stub.seen) for stub in stubs] == [0, 4, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["full", "loading", "locked", "drop"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_has_not_begun_is_sent_to_another_node(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, dialect: str, mode: str, stream: bool
) -> None:
    text = unique()
    assert node_of(ask(web, dialect, text, stream=stream)) == first.name
    first.mode = mode
    answer = ask(web, dialect, text, stream=stream)
    assert answer.status_code == 200 and TEXT in answer.text, answer.text
    assert [stub.name for stub in stubs if stub.seen and stub is not first] == [node_of(answer)]
    assert sum(len(stub.seen) for stub in stubs if stub is not first) == 1
    assert len(first.seen) <= 2, "never twice to the same node"
    assert node_of(ask(web, dialect, text, stream=stream)) != first.name, "left out at once"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_breaks_ends_with_an_error_event(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, dialect: str
) -> None:
    text = unique()
    assert ask(web, dialect, text, stream=True).status_code == 200
    first.mode, told = "cut", b""
    with web.stream("POST", dialect, json=body_of(dialect, text, model="served", stream=True)) as streamed:
        for piece in streamed.iter_raw():
            told += piece
            if b"data:" in told:
                first.was_read.set()
    answer = httpx.Response(streamed.status_code, headers=streamed.headers, content=told)
    assert answer.status_code == 200 and node_of(answer) == first.name
    last = answer.text.rstrip().split("\n\n")[-1]
    if dialect == "chat/completions":
        events = answer.text.rstrip().split("\n\n")
        assert events[-1] == "data: [DONE]" and json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    elif dialect == "messages":
        assert last.startswith("event: error\n") and '"error"' in last and "message_stop" not in answer.text
    else:
        assert last.startswith("event: response.failed\n") and "response.completed" not in answer.text
    assert [len(stub.seen) for stub in stubs] == [0, 2, 0], "what has begun is not sent again"


def answering(stub: NodeStub, write: Callable[[BaseHTTPRequestHandler], Any]) -> list[str]:
    """Answers what is asked of its model in this way, and keeps the encodings that were allowed for it."""
    asked: list[str] = []

    def instead(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET":
            stub._get(handler)
        elif "/cache/" in handler.path:
            stub._post(handler)
        else:
            asked.append(handler.headers["Accept-Encoding"])
            handler.rfile.read(int(handler.headers["Content-Length"]))
            handler.close_connection = True
            write(handler)

    stub.instead = instead
    return asked


def is_packed(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n\r\n")
    handler.wfile.write(gzip.compress(b"{}"))


def without_end(begin: bytes, line: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + begin)
        with suppress(OSError):
            for _ in range(4 * MOST_ANSWER_MEBIBYTES):
                handler.wfile.write(line * (2**20 // len(line)))

    return write


LONG_LINE, MANY_SIGNS_OF_LIFE = without_end(b"data: ", b" "), without_end(b"", b": alive\n")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("stream", "answers"),
    [*itertools.product([False, True], [None, is_packed, LONG_LINE]), (False, MANY_SIGNS_OF_LIFE)],
)
def test_an_answer_that_a_node_does_not_give(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, dialect: str, stream: bool, answers: Any
) -> None:
    """LiteLLM would follow it, with the conversation (``None``: it leads elsewhere), unpack it, and keep it."""
    elsewhere = f"HTTP/1.1 307 Moved\r\nContent-Length: 0\r\nLocation: {stubs[2].url}/v1/elsewhere\r\n\r\n"
    asked = answering(first, answers or (lambda handler: handler.wfile.write(elsewhere.encode())))
    answer = ask(web, dialect, stream=stream)
    assert answer.status_code == 200
    # LiteLLM passes pieces of the messages dialect on as they come: it has begun.
    assert TEXT in answer.text or (dialect == "messages" and stream and "event: error" in answer.text)
    assert asked == ["identity"] and "elsewhere" not in [each.path for stub in stubs for each in stub.seen]


FAULTS = {
    "nothing": b"200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n",
    "page": b"200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
    "500": b'500 No\r\nContent-Type: application/json\r\nContent-Length: 33\r\n\r\n{"error": {"message": "a fault"}}',
    "500 page": b"500 No\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
}


MADE_UP = {("chat/completions", True), ("messages", False)}  # LiteLLM makes an answer of nothing there


@pytest.mark.parametrize(
    ("path", "stream", "fault"),
    [
        (path, stream, fault)
        for path, stream, fault in itertools.product([*DIALECTS, "completions"], [False, True], FAULTS)
        if "500" in fault or (path, stream) not in MADE_UP
    ],
)
def test_a_node_that_answers_with_no_answer_has_failed(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, path: str, stream: bool, fault: str
) -> None:
    answering(first, lambda handler: handler.wfile.write(b"HTTP/1.1 " + FAULTS[fault]))
    answer = ask(web, path, stream=stream)
    assert answer.status_code == 200 and (TEXT in answer.text or path == "completions"), answer.text
    assert node_of(answer) != first.name


def test_a_request_that_kills_its_node_does_not_kill_all(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub
) -> None:
    for stub in stubs:
        stub.mode = "drop"
    answer = ask(web, "chat/completions")
    assert answer.status_code == 503 and "broke" in answer.text
    assert sum(len(stub.seen) for stub in stubs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_frozen_node_is_noticed(web: httpx.Client, stubs: list[NodeStub], first: NodeStub, stream: bool) -> None:
    text = unique()
    assert ask(web, "messages", text).status_code == 200
    first.mode = "frozen"
    began = time.monotonic()
    answer = ask(web, "messages", text, stream=stream)
    assert answer.status_code == 200 and TEXT in answer.text and time.monotonic() - began < 60
    if stream:  # signs of life went out with the head, so a comment names the node that answered
        assert told_late(answer) and answer.headers[NODE_HEADER].startswith(first.name)
    assert node_of(answer) in {stub.name for stub in stubs} - {first.name}
    first.thaw.set()
    first.thaw = threading.Event()


@pytest.mark.parametrize("mode", ["ok", "drop", "full"])
def test_vectors_go_past_litellm(web: httpx.Client, stubs: list[NodeStub], first: NodeStub, mode: str) -> None:
    first.mode = mode
    answer = web.post("embeddings", json={"model": "served", "input": "a"})
    assert answer.status_code == 200 and answer.json()["object"] == "list"
    assert (node_of(answer) == first.name) == (mode == "ok")


def test_a_model_that_one_node_has(web: httpx.Client, stubs: list[NodeStub], first: NodeStub) -> None:
    for dialect in DIALECTS:
        assert node_of(ask(web, dialect, model="only-here")) == stubs[2].name
        assert node_of(ask(web, dialect, model="only-here+titles")) == stubs[2].name
    listed = [card["id"] for card in web.get("models").json()["data"]]
    assert listed.count("served") == 1 and "only-here" in listed
    known = {entry["model_name"] for entry in web.get("model/info").json()["data"]}
    assert {"served", "default", "only-here"} <= known


def test_a_response_is_gone_on_from_where_it_is_stored(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub
) -> None:
    made = ask(web, "responses").json()
    first.running, stubs[0].running = 50, 0
    wait_for_looks(stubs)
    more = {"previous_response_id": made["id"]}
    assert node_of(ask(web, "responses", **more)) == first.name, b64decode(made["id"].removeprefix("resp_") + "==")
    first.mode = "loading"
    refused = [ask(web, "responses", **more) for _ in range(2)]
    assert {answer.status_code for answer in refused} == {503}, "nobody else has it"
    assert [len(stub.seen) for stub in stubs if stub is not first] == [0, 0]


def test_a_stored_response_is_found_where_it_is(web: httpx.Client, stubs: list[NodeStub], first: NodeStub) -> None:
    own = responses_body({"model": "served"})["id"]
    made = ask(web, "responses").json()["id"]
    first.kept.add(own)
    for _ in range(6):
        got = web.get(f"responses/{made}")
        assert got.status_code == 200, got.text
        assert web.get(f"responses/{got.json()['id']}").status_code == 200, "its own name means it, too"
        assert web.get(f"responses/{made}/input_items").status_code == 200
        assert web.delete(f"responses/{made}").json()["deleted"] is True
    assert [stub.seen for stub in stubs if stub is not first] == [[], []]
    asked = {each.path for each in first.seen}
    assert asked == {"responses", f"GET responses/{own}", f"GET responses/{own}/input_items", f"DELETE responses/{own}"}
    assert web.get("responses/resp_nobody").status_code == 404
    first.kept.clear()


def test_neither_a_client_nor_the_log_sees_the_key_of_a_node(
    web: httpx.Client, stubs: list[NodeStub], first: NodeStub, tmp_path_factory: pytest.TempPathFactory
) -> None:
    said: list[httpx.Response] = [web.get("models"), web.get("model/info")]
    for mode in ("ok", "full", "drop", "cut", "locked"):
        for stub in stubs:
            stub.mode = mode
            stub.was_read.set()
        for dialect in DIALECTS:
            said += [ask(web, dialect, stream=stream) for stream in (False, True)]
    text = "".join(f"{answer.headers}{answer.text}" for answer in said)
    (log,) = tmp_path_factory.getbasetemp().glob("nodes[0-9]*/log")
    text += log.read_text("utf-8")
    assert not any(key in text for key in KEYS)
    master = web.headers["authorization"].removeprefix("Bearer ")
    assert [stub.keys for stub in stubs] == [{KEYS[0]}, {KEYS[1]}, {KEYS[1]}], master
