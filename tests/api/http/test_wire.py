"""Requests as bytes: what is ambiguous is refused, and what is read is what a second reader reads, too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.api.http.wire import FREE_CHUNKS, ChunkedBody, Head, body_reader, find_head, read_head
from start_llm.api.server import ApiServer
from start_llm.core.errors import StartLLMError
from tests.api import conftest
from tests.api.conftest import Connect
from tests.api.fakes import FakeService
from tests.kinds import rounds

CHAT = json.dumps(conftest.CHAT).encode()
LIMIT = 1 << 20
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(CHAT)
CHUNKED = POST + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n" % len(CHAT) + CHAT + b"\r\n"
SMUGGLED = POST + HOST + LENGTH + b"\r\n" + CHAT
"""A second request that stands behind the one that is tried: nobody may run it."""

AMBIGUOUS = {
    "a header line that is none, body behind it": POST + HOST + b"garbage\r\n" + LENGTH + b"\r\n" + CHAT,
    "a bare LF in the head": POST + b"Host: localhost\n" + LENGTH + b"\r\n" + CHAT,
    "a head with bare LFs only": (POST + HOST + LENGTH).replace(b"\r", b"") + b"\n" + CHAT,
    "a bare CR in the head": POST + HOST + b"X: a\rContent-Length: 0\r\n" + LENGTH + b"\r\n" + CHAT,
    "a NUL in a value": POST + HOST + b"X: a\0b\r\n" + LENGTH + b"\r\n" + CHAT,
    "a space before the colon": POST + HOST + b"Content-Length : 5\r\n" + LENGTH + b"\r\n" + CHAT,
    "a folded line": POST + HOST + b"X: a\r\n " + LENGTH + b"\r\n" + CHAT,
    "no name": POST + HOST + b": a\r\n" + LENGTH + b"\r\n" + CHAT,
    "two hosts": POST + HOST + HOST + LENGTH + b"\r\n" + CHAT,
    "no host": POST + LENGTH + b"\r\n" + CHAT,
    "another host in the target": b"POST http://evil.example/ HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + CHAT,
    "two origins": POST + HOST + b"Origin: http://localhost\r\n" * 2 + LENGTH + b"\r\n" + CHAT,
    "two equal lengths": POST + HOST + LENGTH + LENGTH + b"\r\n" + CHAT,
    "two lengths in one line": POST + HOST + LENGTH.strip() + b", %d\r\n\r\n" % len(CHAT) + CHAT,
    "a signed length": POST + HOST + b"Content-Length: +%d\r\n\r\n" % len(CHAT) + CHAT,
    "an empty length": POST + HOST + b"Content-Length:\r\n\r\n" + CHAT,
    "two codings": POST + HOST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "another coding": POST + HOST + b"Transfer-Encoding: gzip\r\n" + LENGTH + b"\r\n" + CHAT,
    "a negative length": POST + HOST + b"Content-Length: -5\r\n\r\n" + CHAT,
    "a coding in front of chunked": POST + HOST + b"Transfer-Encoding: x, chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "a coding and a length": POST + HOST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "a coding in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + CHUNK + b"0\r\n\r\n",
    "0x in a chunk's size": CHUNKED + b"0x" + CHUNK + b"0\r\n\r\n",
    "_ in a chunk's size": CHUNKED + b"0_" + CHUNK + b"0\r\n\r\n",
    "a sign in a chunk's size": CHUNKED + b"+" + CHUNK + b"0\r\n\r\n",
    "a space in front of a chunk's size": CHUNKED + b" " + CHUNK + b"0\r\n\r\n",
    "a space behind a chunk's size": CHUNKED + CHUNK.replace(b"\r\n", b" \r\n", 1) + b"0\r\n\r\n",
    "a bare LF behind a chunk's size": CHUNKED + CHUNK.replace(b"\r\n", b"\n", 1) + b"0\r\n\r\n",
    "a bare LF behind a chunk": CHUNKED + CHUNK[:-2] + b"\n0\r\n\r\n",
    "a bare LF in a chunk's extension": CHUNKED + CHUNK.replace(b"\r\n", b";a\nb\r\n", 1) + b"0\r\n\r\n",
    "no number as a chunk's size": CHUNKED + b"zz\r\n" + CHUNK + b"0\r\n\r\n",
    "a chunk that is longer than it says": CHUNKED + CHUNK[:-2] + b"}\r\n0\r\n\r\n",
    "a bare LF behind the chunks": CHUNKED + CHUNK + b"0\r\n\n",
    "a bare LF in a trailer": CHUNKED + CHUNK + b"0\r\nX: y\n\n",
    "a trailer that is none": CHUNKED + CHUNK + b"0\r\nGET / HTTP/1.1\r\n\r\n",
    "two spaces in the first line": POST.replace(b" HTTP", b"  HTTP") + HOST + LENGTH + b"\r\n" + CHAT,
    "a control character in the path": POST.replace(b"/v1", b"/\x01v1") + HOST + LENGTH + b"\r\n" + CHAT,
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_refused(
    server: ApiServer, service: FakeService, connect: Connect, name: str
) -> None:
    raw = connect(server).send(AMBIGUOUS[name] + SMUGGLED)
    status, headers, body = raw.response()
    assert (status, headers["connection"]) == (400, "close"), body
    assert raw.is_closed()
    assert service.requests == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/2.0\r\n", 505),
        (b"PRI * HTTP/2.0\r\n", 505),
        (b"GET / HTTP/1.2\r\n", 505),
        (b"GET /\r\n", 400),
        (b"GARBAGE\r\n", 400),
        (b"GET\r\n", 400),
        (b"GET / HTTP/9.9\r\n", 505),
        (b"GET /health HTTP/1.1 extra\r\n", 400),
        (b"GET http://[::1 HTTP/1.1\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n", 414),
        (b"GET /health HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n", 431),
        (POST + b"Content-Length: 1" + b"0" * 5000 + b"\r\n", 413),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 101, 431),
    ],
)
def test_heads_that_are_refused(server: ApiServer, connect: Connect, head: bytes, status: int) -> None:
    answered, headers, _ = connect(server).send(head + HOST + b"\r\n").response()
    assert (answered, headers["connection"]) == (status, "close")


def test_what_is_sound_is_served(server: ApiServer, service: FakeService, connect: Connect) -> None:
    requests = [
        POST + HOST + b"X:\tsome\xe9thing \r\nX:\r\nx-twice: a\r\nx-twice: b\r\n" + LENGTH + b"\r\n" + CHAT,
        POST + HOST.upper().replace(b"LOCALHOST", b"localhost:80") + b"content-length: 00%d\r\n\r\n" % len(CHAT) + CHAT,
        b"\r\n" + POST + HOST + LENGTH + b"\r\n" + CHAT,
        b"POST http://LOCALHOST/v1/chat/completions?x=y#z HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + CHAT,
        CHUNKED + CHUNK.replace(b"\r\n", b" ;x=y\r\n", 1) + b"000\r\nX: y\r\n\r\n",
        (POST.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + CHAT),
        POST + HOST + b"Content-Type: application/x-www-form-urlencoded\r\n" + LENGTH + b"\r\n" + CHAT,  # curl's
    ]
    for request in requests:
        status, _, body = connect(server).send(request).response()
        assert status == 200, body
    assert len(service.requests) == len(requests)


def test_a_path_with_two_slashes_is_no_host() -> None:
    head = read_head(b"GET //evil.example/x HTTP/1.1\r\nHost: localhost")
    assert head.path == "//evil.example/x"


def test_old_clients_and_polite_ones_get_their_connection_closed(server: ApiServer, connect: Connect) -> None:
    for lines in (b"GET /health HTTP/1.0\r\n", b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: x, Close\r\n"):
        raw = connect(server).send(lines + b"\r\n")
        assert raw.response()[1]["connection"] == "close"
        assert raw.is_closed()


def test_pipelined_refusals_do_not_pile_up(server: ApiServer, connect: Connect) -> None:
    one = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
    raw = connect(server).send(one * 1800)
    count, data = 0, b""
    while count < 1800:
        data = data[-11:] + raw.socket.recv(1 << 20)
        count += data.count(b"HTTP/1.1 404")
        data = data[data.rfind(b"HTTP/1.1 404") + 1 :]
    assert raw.get("/health").response()[0] == 200


def test_tiny_chunks_are_refused() -> None:
    reader = ChunkedBody(LIMIT)
    began = time.perf_counter()
    with pytest.raises(StartLLMError, match="too small"):
        reader.feed(bytearray(b"1\r\nx\r\n" * 100_000))
    assert time.perf_counter() - began < 20
    assert len(ChunkedBody(LIMIT).feed(bytearray(b"1\r\nx\r\n" * (FREE_CHUNKS - 1)))) == FREE_CHUNKS - 1


# --- beside h11, which reads requests for many a server ---


def parse(parts: list[bytes]) -> tuple[Head, bytes, bytes]:
    """Head, body and what is left. Raises StartLLMError."""
    received, head, reader, body = bytearray(), None, None, b""
    searched = 0
    for part in parts:
        received += part
        if head is None:
            end = find_head(received, searched)
            searched = len(received)
            if end < 0:
                continue
            head = read_head(bytes(received[:end]))
            del received[: end + 4]
            reader = body_reader(head, LIMIT)
        if reader is not None and not reader.complete:
            body += reader.feed(received)
    assert head is not None and reader is not None and reader.complete, "incomplete"
    return head, body, bytes(received)


def h11_parse(raw: bytes) -> tuple[h11.Request, bytes, bytes]:
    connection, body, request = h11.Connection(h11.SERVER), b"", None
    connection.receive_data(raw)
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "incomplete"
        if isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
    assert request is not None
    return request, body, connection.trailing_data[0]


def pieces(data: st.DataObject, raw: bytes) -> Iterator[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        yield raw[begin:end]


LINES = st.sampled_from([
    b"Host: localhost\r\n", b"Host: a\r\n", b"X: y\r\n", b"X : y\r\n", b" folded\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 05\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: 0x5\r\n", b"Connection: close\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: CHUNKED\r\n", b"Transfer-Encoding: gzip\r\n",
    b"Transfer-Encoding : chunked\r\n", b"X: a\nY: b\r\n", b"X: \x00\r\n", b"X: \xff\r\n", b"nothing\r\n", b"\r\n",
])  # fmt: skip
BODIES = st.sampled_from([
    b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"2\r\nhe\r\n3;x\r\nllo\r\n0\r\nA: b\r\n\r\n", b"5\r\nhello\r\n0\r\n\n",
    b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n", b"",
])  # fmt: skip
FIRST = st.sampled_from([POST, b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.0\r\n", b"POST  / HTTP/1.1\r\n"])
REQUESTS = st.builds(
    lambda first, lines, body: first + b"".join(lines) + b"\r\n" + body + b"GET / HTTP/1.1\r\nHost: b\r\n\r\n",
    FIRST, st.lists(LINES, max_size=5), BODIES,
)  # fmt: skip


@settings(max_examples=rounds(400), deadline=None)
@given(REQUESTS, st.data())
def test_what_is_read_is_what_h11_reads(raw: bytes, data: st.DataObject) -> None:
    try:
        head, body, rest = parse(list(pieces(data, raw)))
    except (StartLLMError, AssertionError):
        return
    request, other_body, other_rest = h11_parse(raw)
    assert (head.method.encode(), head.target.encode()) == (request.method, request.target)
    assert (body, rest) == (other_body, other_rest)
    others = [(name, value.lower()) for name, value in request.headers]  # it writes some of them small
    for name, value in head.headers.items():
        assert (name.encode(), value.encode("latin-1").lower()) in others


@settings(max_examples=rounds(200), deadline=None)
@given(st.binary(max_size=200), st.data())
def test_any_cut_of_a_sound_request_reads_the_same(body: bytes, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), max_size=5))
    chunks, left = b"", body
    for size in sizes:
        piece, left = left[:size], left[size:]
        chunks += b"%X\r\n" % len(piece) + piece + b"\r\n" if piece else b""
    chunks += b"%x;q=1\r\n" % len(left) + left + b"\r\n" if left else b""
    raw = CHUNKED + chunks + b"0\r\nT: v\r\n\r\nrest"
    head, read, rest = parse(list(pieces(data, raw)))
    assert (head.method, head.length, read, rest) == ("POST", None, body, b"rest")


@settings(max_examples=rounds(300), deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    for raw in (noise, POST + HOST + noise, CHUNKED + noise):
        try:
            parse([raw])
        except (StartLLMError, AssertionError):
            continue
