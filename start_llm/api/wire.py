"""Bytes of one HTTP/1.1 request: a buffered reader over a socket, and bodies of both framings.

Knows sizes and deadlines, not routes. Used on the thread that owns the connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping

from start_llm.core.errors import BadRequest, ClientGone, RequestTimeout, TooLarge

LINE_LIMIT = 65536
CHUNK_HEAD_LIMIT = 1024


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


class Reader:
    """A file-like reader that starts with bytes already received and goes on with the socket.

    `rest` is what was received and not yet read: a pipelined next request.
    """

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        self._connection = connection
        self._buffer = bytearray(received)
        self._deadline: float | None = None

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)

    def set_deadline(self, seconds: float) -> None:
        """Everything read from now on must arrive within `seconds`."""
        self._deadline = time.monotonic() + seconds

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises ClientGone, RequestTimeout."""
        while len(self._buffer) < size:
            self._receive(max(65536, size - len(self._buffer)))
        return self._take(size)

    def readline(self, limit: int = LINE_LIMIT) -> bytes:
        """Up to and with the next newline, at most `limit` bytes."""
        start = 0
        while True:
            end = self._buffer.find(b"\n", start, limit)
            if end >= 0:
                return self._take(end + 1)
            if len(self._buffer) >= limit:
                return self._take(limit)
            start = len(self._buffer)
            self._receive(65536)

    def close(self) -> None:
        """For `http.server`; the connection is closed by its owner."""

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def _receive(self, size: int) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise RequestTimeout("The request took too long to arrive.")
        try:
            data = self._connection.recv(min(size, 1 << 20))
        except TimeoutError:
            raise RequestTimeout("The request took too long to arrive.") from None
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None
        if not data:
            raise ClientGone("The client closed the connection before its request was complete.")
        self._buffer += data


def body_length(headers: Mapping[str, str], lengths: list[str], limit: int) -> int | None:
    """The announced size in bytes; ``None`` for a chunked body, 0 where there is none.

    Raises:
        BadRequest: framing that two parsers could read differently.
        TooLarge: more than `limit` bytes are announced.
    """
    encoding = headers.get("Transfer-Encoding")
    if encoding is not None:
        if lengths:
            raise BadRequest("Content-Length and Transfer-Encoding cannot stand together.", param="Content-Length")
        if encoding.strip().lower() != "chunked":
            raise BadRequest(f"Transfer-Encoding {encoding!r} is not supported, only chunked.")
        return None
    if not lengths:
        return 0
    if len(set(lengths)) > 1 or not lengths[0].strip().isascii() or not lengths[0].strip().isdigit():
        raise BadRequest(f"Content-Length {', '.join(lengths)!r} is not one whole number.", param="Content-Length")
    length = int(lengths[0])
    if length > limit:
        raise _too_large(length, limit)
    return length


def read_chunked(reader: Reader, limit: int) -> bytes:
    """A chunked body of at most `limit` bytes, its trailers dropped."""
    body = bytearray()
    while True:
        line = reader.readline(CHUNK_HEAD_LIMIT)
        word = line.split(b";", 1)[0].strip()
        try:
            size = int(word, 16) if line.endswith(b"\n") and word[:1] not in b"+-" else -1
        except ValueError:
            size = -1
        if size < 0:
            raise BadRequest(f"A chunk of the body begins with {line[:40]!r}, which is no size in hexadecimal.")
        if len(body) + size > limit:
            raise _too_large(len(body) + size, limit)
        if size == 0:
            break
        body += reader.read(size)
        if reader.readline(3) not in (b"\r\n", b"\n"):
            raise BadRequest("A chunk of the body does not end where its size says.")
    while reader.readline().strip():
        pass
    return bytes(body)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"The request body has {size} bytes or more; the limit is {limit} (MAX_BODY_BYTES).", code="body_too_large"
    )


def is_gone(connection: socket.socket) -> bool:
    """Has the other side closed? Never blocks; the socket must be readable or non-blocking for an answer."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError, TimeoutError):
        return False
    except OSError:
        return True
