"""HTTP/1.1 requests as bytes: heads, and bodies of both framings. Knows no sockets and no routes.

Strict: whatever two programs could read in two ways is refused, since the second reading may hold a request that nobody
has checked. Lines end with CR LF, nothing else; what RFC 9112 lets a server be lenient about is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from start_llm.core.errors import BadRequest, TooLarge

HEAD_LIMIT = 65536
MOST_FIELDS = 100
CHUNK_LINE_LIMIT = 1024
TRAILER_LIMIT = 8192
FREE_CHUNKS = 1000
LEAST_CHUNK = 16
"""Bytes that the chunks of a body must have on average, beyond the first `FREE_CHUNKS`: each costs time."""
LENGTH_DIGITS = 18

SINGLE = frozenset({
    "host", "origin", "content-length", "transfer-encoding", "content-type", "content-encoding", "authorization",
    "x-api-key", "expect",
})  # fmt: skip
"""Fields that decide something; two of them could be read as either."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _VALUE + rb")")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;" + _VALUE + rb")?")
_BARE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)([^?#]*)", re.IGNORECASE)


class Headers(Mapping[str, str]):
    """Header fields by name, whatever their case; of repeated ones the first."""

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._items: dict[str, str] = {}
        for name, value in items:
            self._items.setdefault(name.lower(), value)

    def __getitem__(self, name: str) -> str:
        return self._items[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body."""

    method: str
    target: str  # as it was sent; visible ASCII only. `path`: without its query and slashes at its end
    path: str
    headers: Headers
    length: int | None  # bytes of the body, 0 if there is none; ``None`` if it comes in chunks
    keep_alive: bool  # the client can take another answer on this connection
    expects: bool  # it waits for ``100 Continue`` before it sends the body


def find_head(received: bytearray, searched: int) -> int:
    """Where the head ends, before its empty line; -1 if it is not complete. `searched` bytes were looked at before.

    Raises BadRequest: a bare CR or LF; or too long: status 414 or 431.
    """
    end = received.find(b"\r\n\r\n", max(0, searched - 3))
    if _BARE.search(received, max(0, searched - 1), len(received) if end < 0 else end + 4):
        raise BadRequest("A line of the request's head ends with a bare CR or LF; lines end with CR LF.")
    if end > HEAD_LIMIT or (end < 0 and len(received) > HEAD_LIMIT):
        if received.find(b"\r\n", 0, HEAD_LIMIT) < 0:
            raise _refusal(414, f"The first line of the request is too long: at most {HEAD_LIMIT} bytes are read.")
        raise _refusal(431, f"The head of the request is too long: at most {HEAD_LIMIT} bytes are read.")
    return end


def read_head(raw: bytes) -> Head:
    """Reads a head, given without its empty line. Raises BadRequest (400, 431, 505), TooLarge."""
    first, *lines = raw.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    if request is None:
        raise BadRequest(f"The request begins with {_shown(first)}, which is no 'METHOD /path HTTP/1.1'.")
    version = int(request[3]), int(request[4])
    if version not in ((1, 0), (1, 1)):
        raise _refusal(505, f"HTTP/{version[0]}.{version[1]} is not spoken here, only HTTP/1.1 and HTTP/1.0.")
    fields = _fields(lines)
    headers = Headers(fields)
    if version == (1, 1) and "Host" not in headers:
        raise BadRequest("HTTP/1.1 needs a Host header.", param="Host")
    target = request[2].decode("ascii")
    options = {word.strip().lower() for name, value in fields if name == "connection" for word in value.split(",")}
    return Head(
        method=request[1].decode("ascii"),
        target=target,
        path=_path(target, headers.get("Host", "")),
        headers=headers,
        length=_body_length(headers, version),
        keep_alive=version == (1, 1) and "close" not in options,
        expects=version == (1, 1) and headers.get("Expect", "").lower() == "100-continue",
    )


def _fields(lines: list[bytes]) -> list[tuple[str, str]]:
    """Names in lower case, values as Latin-1."""
    if len(lines) > MOST_FIELDS:
        raise _refusal(431, f"The request has {len(lines)} header fields; at most {MOST_FIELDS} are read.")
    fields, seen = [], set()
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BadRequest(f"The header line {_shown(line)} is no 'Name: value'.")
        name = field[1].decode("ascii").lower()
        if name in SINGLE and name in seen:
            raise BadRequest(f"The header {name!r} is there more than once.", param=name)
        seen.add(name)
        fields.append((name, field[2].decode("latin-1").strip(" \t")))
    return fields


def _path(target: str, host: str) -> str:
    """Raises BadRequest: neither a path nor a whole address of this host."""
    if target == "*":
        return target
    if target.startswith("/"):
        path = re.split(r"[?#]", target, maxsplit=1)[0]
    else:
        address = _ABSOLUTE.fullmatch(target.split("?")[0].split("#")[0])
        if address is None:
            raise BadRequest(f"{target[:80]!r} is no address.")
        if address[1].lower() != host.lower():
            raise BadRequest(f"{target[:80]!r} names another host than the Host header, {host[:80]!r}.", param="Host")
        path = address[2]
    return path.rstrip("/") or "/"


def _body_length(headers: Headers, version: tuple[int, int]) -> int | None:
    length, coding = headers.get("Content-Length"), headers.get("Transfer-Encoding")
    if coding is not None:
        if version == (1, 0):
            raise BadRequest("HTTP/1.0 has no Transfer-Encoding.", param="Transfer-Encoding")
        if length is not None:
            raise BadRequest("Content-Length and Transfer-Encoding cannot stand together.", param="Content-Length")
        if coding.lower() != "chunked":
            raise BadRequest(f"Transfer-Encoding {coding[:80]!r} is not supported, only chunked.")
        return None
    if length is None:
        return 0
    if not (length.isascii() and length.isdigit()):
        raise BadRequest(f"Content-Length {length[:80]!r} is not one whole number.", param="Content-Length")
    digits = length.lstrip("0")
    if len(digits) > LENGTH_DIGITS:
        raise TooLarge(f"Content-Length has {len(digits)} digits.", param="Content-Length", code="body_too_large")
    return int(digits or "0")


class PlainBody:
    """A body of `length` bytes, as a reader that takes it off a connection's bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0

    def feed(self, received: bytearray) -> bytes:
        """What is new of the body; what belongs to it is removed from `received`."""
        taken = _take(received, self._left)
        self._left -= len(taken)
        self.complete = self._left == 0
        return taken


class ChunkedBody:
    """A body in chunks, of at most `limit` bytes. Extensions and trailers are read and dropped."""

    def __init__(self, limit: int) -> None:
        self.complete = False
        self._limit = limit
        self._size = self._chunks = self._left = self._trailers = 0
        self._ends_chunk = self._is_last = False  # a chunk's CR LF is next; lines behind the last chunk are

    def feed(self, received: bytearray) -> bytes:
        """As that of `PlainBody`. Raises BadRequest, TooLarge."""
        body = bytearray()
        while not self.complete:
            if self._left:
                taken = _take(received, self._left)
                body += taken
                self._left -= len(taken)
                if self._left:
                    break
            if self._ends_chunk:
                if not b"\r\n".startswith(received[:2]):
                    raise BadRequest("A chunk of the body does not end where its size says.")
                if len(received) < 2:
                    break
                del received[:2]
                self._ends_chunk = False
            line = _take_line(received, TRAILER_LIMIT if self._is_last else CHUNK_LINE_LIMIT)
            if line is None:
                break
            if self._is_last:
                self._read_trailer(line)
            else:
                self._read_size(line)
        return bytes(body)

    def _read_size(self, line: bytes) -> None:
        chunk = _CHUNK.fullmatch(line)
        if chunk is None:
            raise BadRequest(f"A chunk of the body begins with {_shown(line)}, which is no size in hexadecimal.")
        self._left = int(chunk[1], 16)
        self._ends_chunk, self._is_last = self._left > 0, self._left == 0
        self._size += self._left
        self._chunks += 1
        if self._size > self._limit:
            raise too_large(self._size, self._limit)
        if self._chunks > FREE_CHUNKS + self._size // LEAST_CHUNK:
            raise BadRequest(
                f"The body comes in chunks that are too small: {self._chunks} chunks for {self._size} bytes."
            )

    def _read_trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if self._trailers > TRAILER_LIMIT:
            raise _refusal(431, f"What stands behind the body is too long: at most {TRAILER_LIMIT} bytes are read.")
        if line and _FIELD.fullmatch(line) is None:
            raise BadRequest(f"The line {_shown(line)} behind the body is no 'Name: value'.")
        self.complete = not line


def body_reader(head: Head, limit: int) -> PlainBody | ChunkedBody:
    """For a body that is at most `limit` bytes long. Raises TooLarge where more are announced."""
    if head.length is None:
        return ChunkedBody(limit)
    if head.length > limit:
        raise too_large(head.length, limit)
    return PlainBody(head.length)


def too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"The request body has {size} bytes or more; the limit is {limit}.", code="body_too_large")


def _take(received: bytearray, most: int) -> bytes:
    taken = bytes(memoryview(received)[:most])
    del received[: len(taken)]
    return taken


def _take_line(received: bytearray, limit: int) -> bytes | None:
    """The next line without its end; ``None`` if it is not complete."""
    end = received.find(b"\n", 0, limit)
    if end < 0:
        if len(received) >= limit:
            raise BadRequest(f"A line between the chunks of the body is too long: at most {limit} bytes are read.")
        return None
    if end == 0 or received[end - 1] != 0x0D:
        raise BadRequest("A line between the chunks of the body ends with a bare LF; lines end with CR LF.")
    line = bytes(memoryview(received)[: end - 1])
    del received[: end + 1]
    return line


def _refusal(status: int, message: str) -> BadRequest:
    error = BadRequest(message)
    error.status = status
    return error


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("latin-1"))
