"""The edge itself, over raw sockets."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from start_llm.api import server as api_server
from start_llm.api.http import connection as connections
from start_llm.api.http import front
from start_llm.api.server import ApiServer
from start_llm.core.errors import (
    BadRequest,
    ContextLengthExceeded,
    NotFound,
    OutOfMemory,
    QueueFull,
    StartLLMError,
    Unavailable,
)
from start_llm.core.events import Failed, Progress, TextDelta
from start_llm.core.settings import SettingsError
from tests.api.conftest import CHAT, PATH, Connect, Serve
from tests.api.fakes import DONE, FIRST, FakeService, hold
from tests.lazy import Package

ANTHROPIC: Any = Package("anthropic.types")


def stream_and_hold(service: FakeService) -> None:
    service.script = lambda request: [FIRST, TextDelta("a"), hold]


def test_health_says_what_the_engine_does(server: ApiServer, service: FakeService, connect: Connect) -> None:
    status, _, body = connect(server).get("/health").response()
    assert status == 200
    assert json.loads(body) == {
        "status": "ok", "ok": True, "state": "ready", "running": 1, "queued": 2, "detail": "", "since": None,
        "capabilities": {},
    }  # fmt: skip
    service.ok = False
    assert connect(server).get("/health").response()[0] == 503


def test_light_routes_answer_while_all_workers_stream(serve: Serve, service: FakeService, connect: Connect) -> None:
    server = serve(http_threads=2)
    stream_and_hold(service)
    for _ in range(4):
        connect(server).post(PATH, CHAT | {"stream": True})
    streams = [service.streams.get(timeout=60) for _ in range(2)]
    for path in ("/health", "/metrics", "/v1/loads", "/v1/models", "/v1/models/tiny"):
        assert connect(server).get(path).response()[0] == 200
    for stream in streams:
        stream.close()


def test_loads_are_in_sglangs_fields(server: ApiServer, connect: Connect) -> None:
    figures = {"kv_bytes": 30.0, "kv_budget_bytes": 120.0, "kv_tokens": 500.0}
    server.metrics.watch_figures(lambda: figures)
    body = json.loads(connect(server).get("/v1/loads").response()[2])
    (load,) = body["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (1, 2, 0)
    assert (load["num_used_tokens"], load["max_total_num_tokens"], load["token_usage"]) == (500, 2000, 0.25)
    figures.clear()
    (load,) = json.loads(connect(server).get("/v1/loads").response()[2])["loads"]
    assert (load["token_usage"], load["max_total_num_tokens"]) == (0, 0)


def test_every_kind_of_client_finds_the_model_with_its_true_context(
    server: ApiServer, service: FakeService, connect: Connect
) -> None:
    """Zed (LM Studio's routes), llama.cpp's clients, Anthropic's library: all from one card."""

    def get(path: str) -> Any:
        status, _, body = connect(server).get(path).response()
        assert status == 200
        return json.loads(body)

    service.scale = 2.5
    (listed,) = get("/api/v0/models")["data"]
    assert (listed["max_context_length"], listed["loaded_context_length"], listed["state"]) == (4096, 4096, "loaded")
    assert (listed["type"], listed["capabilities"]) == ("llm", ["tool_use"])
    assert get("/api/v0/models/gpt-x/y") == listed | {"id": "gpt-x/y"}
    assert get("/v1/models/gpt-x%2Fy")["id"] == get("/v1/models/gpt-x/y")["id"] == "gpt-x/y"
    props, slots = get("/props"), get("/slots")
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("tiny", 4096)
    assert [slot["is_processing"] for slot in slots] == [True] + [False] * (props["total_slots"] - 1)
    assert len(slots) == props["total_slots"] > 0 and slots[0]["n_ctx"] == 4096
    told = ANTHROPIC.ModelInfo.construct(**get("/v1/models/tiny"))  # as Anthropic's library reads it
    assert (told.max_input_tokens, told.display_name, told.lifecycle) == (10_240, "tiny", "active")


def test_a_full_pool_refuses(serve: Serve, service: FakeService, connect: Connect) -> None:
    server = serve(http_threads=2, max_queue=0)
    stream_and_hold(service)
    held = [connect(server).post(PATH, CHAT | {"stream": True}) for _ in range(10)]
    for _ in range(2):
        service.streams.get(timeout=60)
    big = CHAT | {"x": "x" * 5_000_000}
    status, headers, body = connect(server).post(PATH, big).response()
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert len(held) == 10


def test_a_refusal_says_why_to_who_could_ask_elsewhere(
    server: ApiServer, service: FakeService, connect: Connect
) -> None:
    refused: list[tuple[StartLLMError, str | None]] = [
        (QueueFull("full", retry_after=3), "queue_full"),
        (OutOfMemory("too large"), "out_of_memory"),
        (ContextLengthExceeded(prompt=9, asked=1, limit=8), "context_length_exceeded"),
        (BadRequest("bad"), None),
        (NotFound("none"), None),
        (Unavailable("ends"), None),
    ]
    for path, body in ((PATH, CHAT), ("/v1/messages", CHAT | {"max_tokens": 5}), ("/v1/responses", {"input": "Hi"})):
        for error, word in refused:
            service.script = lambda request, error=error: [Failed(error)]  # type: ignore[misc]
            for stream in (False, True):
                status, headers, _ = connect(server).post(path, body | {"stream": stream}).response()
                assert (status, headers.get("x-start-llm-refusal")) == (error.status, word)
            assert error.__traceback__ is None, "who keeps it would keep the request's body"


def test_a_stream_can_be_asked_to_refuse_by_a_status_however_late(
    server: ApiServer, service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy asks for it, which shows life by itself."""
    monkeypatch.setattr("start_llm.api.handler.HEADER_WAIT", 0.0)
    service.script = lambda request: [Progress(0, 0), Progress(0, 0), Failed(OutOfMemory("too large"))]
    assert connect(server).post(PATH, CHAT | {"stream": True}).response()[0] == 200
    late = "X-Start-LLM-Head: when-planned\r\n"
    status, headers, _ = connect(server).post(PATH, CHAT | {"stream": True}, late).response()
    assert (status, headers["x-start-llm-refusal"]) == (507, "out_of_memory")
    service.script = lambda request: [Progress(0, 0), FIRST, Progress(3, 9), Failed(OutOfMemory("too large"))]
    status, headers, body = connect(server).post(PATH, CHAT | {"stream": True}, late).response()
    assert status == 200 and headers["x-start-llm-cache"] and b"too large" in body


def test_keep_alive_and_pipelining(server: ApiServer, connect: Connect) -> None:
    raw = connect(server)
    for _ in range(3):
        status, headers, _ = raw.post(PATH, CHAT).response()
        assert (status, headers["connection"]) == (200, "keep-alive")
        status, headers, _ = raw.get("/nothing").response()
        assert (status, headers["connection"]) == (404, "keep-alive")
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    raw.send(one + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    data = b""
    while chunk := raw.socket.recv(65536):
        data += chunk
    assert data.count(b"HTTP/1.1 200") == 2


def test_streams_have_pings_and_close_their_connection(serve: Serve, service: FakeService, connect: Connect) -> None:
    server = serve(sse_ping_seconds=0.001)
    service.script = lambda request: [FIRST, Progress(1234, 5678), TextDelta("a"), DONE]
    status, headers, body = connect(server).post(PATH, CHAT | {"stream": True}).response()
    assert b": ping 1234/5678 tokens\n\n" in body and body.endswith(b"data: [DONE]\n\n")
    assert (status, headers["connection"]) == (200, "close")
    assert headers["content-type"].startswith("text/event-stream")


def test_what_is_too_large_is_refused_unread(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a client that is still sending, that waits to be asked for it, and whatever the path and the form."""
    monkeypatch.setattr(api_server, "MOST_BODY_BYTES", 1024)
    server = serve()
    for path, status in ((PATH, 413), ("/nothing", 404)):
        refused = connect(server).post(path, b"x" * 8_000_000).response()
        assert (refused[0], refused[1]["connection"]) == (status, "close")
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"
    form = head.replace(PATH, "/v1/audio/transcriptions") + "Content-Type: multipart/form-data; boundary=x\r\n"
    for sent in (f"{head}Expect: 100-continue\r\n", head, form):
        status, _, body = connect(server).send(f"{sent}Content-Length: 5000\r\n\r\n").response()
        assert status == 413 and "the limit is 1024" in json.loads(body)["error"]["message"]
    chunked = connect(server).send(f"{head}Transfer-Encoding: chunked\r\n\r\nFFFFFF\r\n")
    assert chunked.response()[0] == 413


def test_expect_100_continue(server: ApiServer, connect: Connect) -> None:
    raw = json.dumps(CHAT).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = connect(server).send(head)
    assert connection.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert connection.send(raw).response()[0] == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: 0\r\n", 400),
        ("Content-Length: 2\r\nContent-Type: text/plain\r\n", 415),
        ("Content-Length: 2\r\nContent-Type: application/x-www-form-urlencoded\r\nOrigin: http://localhost\r\n", 415),
        ("Content-Length: 2\r\nContent-Type: application/x-www-form-urlencoded\r\nSec-Fetch-Site: none\r\n", 415),
        ("Content-Length: 2\r\nContent-Encoding: gzip\r\n", 415),
        ("Content-Length: 2\r\nOrigin: https://evil.example\r\n", 403),
        ("Content-Length: 2\r\nOrigin: null\r\n", 403),
    ],
)
def test_bad_heads(server: ApiServer, connect: Connect, lines: str, status: int) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n"
    assert connect(server).send(head + "{}").response()[0] == status


def test_routes_and_methods(server: ApiServer, connect: Connect) -> None:
    status, headers, body = connect(server).get("/nothing").response()
    assert (status, headers["content-type"]) == (404, "application/problem+json")
    assert json.loads(body)["title"] == "Not Found"
    for path, hint in (("/nothing", ""), ("/chat/completions", PATH), ("/v1/v1/messages", "/v1/messages")):
        text = connect(server).get(path).response()[2].decode()
        assert f"There is nothing at {path}. {f'Did you mean {hint}? ' * bool(hint)}/docs lists all paths." in text
    status, headers, body = connect(server).get(PATH).response()
    assert (status, headers["allow"]) == (405, "POST, OPTIONS")
    assert "error" in json.loads(body)
    assert connect(server).get("/health", method="FOO").response()[0] == 405
    status, headers, body = connect(server).get("/health", method="HEAD").response(head_only=True)
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0
    status, headers, _ = connect(server).get("/v1/models/", method="OPTIONS").response()
    assert (status, headers["allow"]) == (204, "GET, HEAD, OPTIONS")


def test_browsers(server: ApiServer, connect: Connect) -> None:
    page = "Origin: http://localhost:3000\r\nAccess-Control-Request-Headers: x-foo\r\n"
    status, headers, _ = connect(server).get(PATH, page, "OPTIONS").response()
    assert status == 204
    assert headers["access-control-allow-origin"] == "http://localhost:3000"
    assert headers["access-control-allow-headers"] == "x-foo"
    _, headers, _ = connect(server).post(PATH, CHAT | {"stream": True}, "Origin: http://127.0.0.1:9\r\n").response()
    assert headers["access-control-allow-origin"] == "http://127.0.0.1:9"


def test_api_key(serve: Serve, connect: Connect) -> None:
    server = serve(api_key="sécret")
    assert connect(server).get("/health").response()[0] == 200
    status, headers, _ = connect(server).get("/v1/models").response()
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert connect(server).get("/v1/models", "Authorization: Bearer wrong\r\n").response()[0] == 401
    for line in ("Authorization: bearer sécret", "X-Api-Key: sécret"):
        raw = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode()
        assert connect(server).send(raw).response()[0] == 200


def test_slow_heads_and_bodies_are_dropped(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "SILENCE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.05)
    monkeypatch.setattr(front, "SWEEP_SECONDS", 0.02)
    server = serve(http_threads=1)
    for begun in ("GET /hea", f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{"):
        slow = connect(server).send(begun)
        assert slow.response()[0] == 408 and slow.is_closed()
    monkeypatch.setattr(front, "HEAD_SECONDS", 0.05)  # for one that has sent nothing
    assert connect(server).is_closed()


def test_a_reset_does_not_hurt(server: ApiServer, connect: Connect) -> None:
    connect(server).send("POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{").close()
    connect(server).close()
    assert connect(server).get("/health").response()[0] == 200


def test_a_port_in_use_is_named(server: ApiServer, serve: Serve) -> None:
    with pytest.raises(SettingsError, match=f"MLX_PORT={server.port}: the port is in use"):
        serve(mlx_port=server.port)


def test_stop_lets_requests_end(serve: Serve, service: FakeService, connect: Connect) -> None:
    server = serve()
    go = threading.Event()
    service.script = lambda request: [FIRST, lambda stream: go.wait(60), TextDelta("late"), DONE]
    raw = connect(server).post(PATH, CHAT | {"stream": True})
    service.streams.get(timeout=60)
    stopper = threading.Thread(target=server.stop, args=(10,))
    stopper.start()
    go.set()
    assert b"late" in raw.response()[2]
    stopper.join(60)
    with pytest.raises(OSError):
        connect(server)


def test_unexpected_errors_are_told_and_counted(server: ApiServer, service: FakeService, connect: Connect) -> None:
    service.script = lambda request: 1 // 0  # type: ignore[assignment,return-value]
    status, _, body = connect(server).post(PATH, CHAT).response()
    assert status == 500 and b"ZeroDivision" not in body
    service.script = lambda request: [FIRST, TextDelta("a"), lambda stream: 1 // 0]
    status, _, told = connect(server).post(PATH, CHAT | {"stream": True}).response()
    assert status == 200 and b'"type":"server_error"' in told and b"ZeroDivision" not in told
    metrics = connect(server).get("/metrics").response()[2].decode()
    assert 'start_llm_unexpected_errors_total{where="api"} 2.0' in metrics


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_tells_running_requests(
    serve: Serve, service: FakeService, connect: Connect, stream: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.api.server.LAST_WORDS_SECONDS", 60.0)
    server = serve(http_threads=threads)
    stream_and_hold(service)
    raw = connect(server).post(PATH, CHAT | {"stream": stream})
    events = service.streams.get(timeout=60)
    if stream:
        assert raw.socket.recv(1, socket.MSG_PEEK), "its head is out; before that a stop is 503 for it, too"
    server.stop(0)
    status, _, body = raw.response()
    assert events.closed.is_set() and status == (200 if stream else 503)
    assert b"shutting down" in body


def test_a_request_that_is_not_under_watch_yet_is_told_of_a_stop(
    serve: Serve, service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, begun, go_on = serve(), threading.Event(), threading.Event()
    stream_and_hold(service)
    watcher, watch, close_all = server._watcher, server._watcher.watch, server._watcher.close_all

    def late(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return watch(*given)

    def end() -> None:
        close_all()
        go_on.set()

    monkeypatch.setattr(watcher, "watch", late)
    monkeypatch.setattr(watcher, "close_all", end)
    raw = connect(server).post(PATH, CHAT)
    assert begun.wait(60)
    server.stop(0)
    status, _, body = raw.response()
    assert status == 503 and b"shutting down" in body
