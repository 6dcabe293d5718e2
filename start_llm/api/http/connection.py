"""Connections at the front: the request that arrives on one, the answer that its client has not taken yet.

A body waits until it is complete: in a little memory, then in a file.
"""

from __future__ import annotations

import logging
import selectors
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from start_llm.api.http.answers import CONTINUE
from start_llm.api.http.routes import Request
from start_llm.api.http.wire import ChunkedBody, Head, PlainBody, body_reader, find_head, read_head
from start_llm.core.errors import Unavailable
from start_llm.core.limits import Allowance

log = logging.getLogger(__name__)

HEAD_SECONDS = 20.0
BODY_SECONDS = 120.0
SILENCE_SECONDS = 20.0
"""A body may pause so long."""

MEMORY_OF_ONE = 1 << 18
"""Bytes of a body that stay in memory: as many bodies as there may be connections fit."""
MOST_BYTES = 1 << 30
"""What all bodies that wait may hold together."""

Admit = Callable[[Head], Request]
"""Raises StartLLMError: the request is refused, whatever its body is."""


class ReceivedBody:
    """One body. Written by the front thread, then read once by another; `close` in any case, more than once if need be.

    A file has no name: it is gone with the process, however that ends.
    """

    def __init__(self, bodies: Allowance) -> None:
        self._bodies = bodies
        self._size = 0
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Raises Unavailable: it does not fit, or the file cannot be written."""
        if self._file is None:  # `close` closes it
            self._file = tempfile.SpooledTemporaryFile(MEMORY_OF_ONE, prefix="start_llm-body-")  # noqa: SIM115
        if not self._bodies.take(len(data)):
            raise Unavailable("Too many large requests are arriving at once. Try again later.")
        self._size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            log.warning("a request's body could not be kept in %s: %s", tempfile.gettempdir(), error)
            raise Unavailable("The server has no room on its disk for the request's body.") from None

    def read(self) -> bytes:
        """All of it. Raises OSError."""
        data = b""
        if self._file is not None:
            self._file.seek(0)
            data = self._file.read()
        self.close()
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._bodies.give_back(self._size)
        self._size = 0


class RequestReader:
    """One request while it arrives: its head, the decision about it, its body. Knows no sockets; front thread only.

    Attributes:
        deadline: when it is given up, on the monotonic clock; 0 until its first bytes are here.
        head, request: ``None`` until they are known; the request has no body yet.
        complete: everything that will be read of it is here; then `received` is when it was, monotonic.
        following: bytes that have arrived behind it.
    """

    def __init__(self, bodies: Allowance, admit: Admit, following: bytes = b"") -> None:
        self.deadline = 0.0
        self.head: Head | None = None
        self.request: Request | None = None
        self.complete = False
        self.received = 0.0
        self.following = bytearray(following)
        self.body = ReceivedBody(bodies)
        self._admit = admit
        self._body_reader: PlainBody | ChunkedBody | None = None
        self._searched = 0
        self._latest = 0.0

    @property
    def keeps_alive(self) -> bool:
        """The connection can take another request behind this one: no body may be on its way that nobody reads."""
        reader = self._body_reader
        if self.head is None or not self.head.keep_alive:
            return False
        return self.head.length == 0 or (reader is not None and reader.complete)

    def take(self, data: bytes, now: float) -> bytes:
        """More bytes. What it returns goes to the client at once. Raises StartLLMError: the request is refused."""
        if not self.deadline:
            self.deadline = now + HEAD_SECONDS
        self.following += data
        answer = self._take_head(now) if self.request is None else b""
        if self.request is not None:
            self._take_body(now)
        return answer

    def _take_head(self, now: float) -> bytes:
        while not self._searched and self.following.startswith(b"\r\n"):  # some clients send one behind a body
            del self.following[:2]
        end = find_head(self.following, self._searched)
        if end < 0:
            self._searched = len(self.following)
            return b""
        self.head = read_head(bytes(memoryview(self.following)[:end]))
        del self.following[: end + 4]
        request = self._admit(self.head)
        if request.most_bytes is not None:
            self._body_reader = body_reader(self.head, request.most_bytes)
            self._latest = now + BODY_SECONDS
        self.request = request
        return CONTINUE if self._body_reader is not None and self.head.expects and not self.following else b""

    def _take_body(self, now: float) -> None:
        if self._body_reader is not None:
            self.deadline = min(self._latest, now + SILENCE_SECONDS)
            if part := self._body_reader.feed(self.following):
                self.body.write(part)
        self.complete = self._body_reader is None or self._body_reader.complete
        self.received = now


@dataclass(eq=False, slots=True)
class Connection:
    """It waits at the front for a request or for its client to take an answer, or a worker has it.

    Belongs to the front thread, and to a worker from the complete request until `Front.take_back`.
    """

    socket: socket.socket
    address: tuple[str, int]
    reader: RequestReader  # of the request that arrives, or of the one that is being answered
    deadline: float  # when it is given up, on the monotonic clock; that of an answer does not move beyond `latest`
    latest: float = 0.0
    outgoing: bytes = b""  # of an answer, not yet taken by the client
    keep: bool = True  # after that it may send its next request; else it is drained
    # answered, but its client may still be sending. Closing at once would send a reset, which can overtake the
    # answer.
    draining: bool = False

    @property
    def is_arriving(self) -> bool:
        return self.reader.deadline > 0 and not self.outgoing and not self.draining

    def close(self) -> None:
        self.reader.body.close()
        self.socket.close()


class Connections(dict[Connection, None]):
    """All that wait, oldest first; one more than `most` closes the oldest (`dropped` counts). Front thread only."""

    def __init__(self, selector: selectors.BaseSelector, most: int) -> None:
        super().__init__()
        self.dropped = 0
        self._selector = selector
        self._most = most

    def add(self, connection: Connection) -> None:
        while len(self) >= self._most:
            self.drop_oldest()
        self[connection] = None
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def look_for(self, connection: Connection, events: int) -> None:
        """What its socket is to be ready for: ``selectors.EVENT_READ`` or ``EVENT_WRITE``."""
        self._selector.modify(connection.socket, events, connection)

    def remove(self, connection: Connection) -> None:
        """It stays open, for somebody else."""
        if connection in self:
            del self[connection]
            self._selector.unregister(connection.socket)

    def drop(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()

    def drop_oldest(self) -> None:
        if self:
            self.dropped += 1
            self.drop(next(iter(self)))


def send_now(connected: socket.socket, data: bytes) -> bytes:
    """Sends what a non-blocking socket takes at once; what is left is returned. Raises OSError."""
    try:
        return data[connected.send(data) :]
    except (BlockingIOError, InterruptedError):
        return data
