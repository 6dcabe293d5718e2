"""One request while it arrives: its head, the decision about it, its body. Knows no sockets; front thread only."""

from __future__ import annotations

from collections.abc import Callable

from start_llm.api.admission import AuthorisedRequest
from start_llm.api.common.answers import CONTINUE
from start_llm.api.http.body import Bodies, ReceivedBody
from start_llm.api.http.wire import BodyReader, Head, body_reader, find_head, read_head

HEAD_SECONDS = 20.0
BODY_SECONDS = 120.0
SILENCE_SECONDS = 20.0
"""A body may pause so long."""

Admit = Callable[[Head], AuthorisedRequest]


class RequestReader:
    """
    Attributes:
        begun: something of it has arrived.
        deadline: when it is given up, on the monotonic clock; set once it has begun.
        head, admitted: `None` until they are known.
        complete: everything that will be read of it is here.
        rest: what has arrived behind it.
    """

    def __init__(self, bodies: Bodies, admit: Admit, rest: bytes = b"") -> None:
        self.begun = False
        self.deadline = 0.0
        self.head: Head | None = None
        self.admitted: AuthorisedRequest | None = None
        self.complete = False
        self.rest = bytearray(rest)
        self.body = ReceivedBody(bodies)
        self._admit = admit
        self._reader: BodyReader | None = None
        self._searched = 0
        self._latest = 0.0

    @property
    def unread(self) -> bool:
        """A body may be on its way that nobody reads."""
        return self.head is None or (self.head.length != 0 and (self._reader is None or not self._reader.complete))

    def take(self, data: bytes, now: float) -> bytes:
        """More bytes. What it returns goes to the client at once. Raises StartLLMError: the request is refused."""
        if not self.begun:
            self.begun = True
            self.deadline = now + HEAD_SECONDS
        self.rest += data
        answer = b""
        if self.admitted is None:
            answer = self._take_head(now)
        if self.admitted is not None:
            self._take_body(self.admitted, now)
        return answer

    def _take_head(self, now: float) -> bytes:
        while not self._searched and self.rest.startswith(b"\r\n"):  # some clients send one behind a body
            del self.rest[:2]
        end = find_head(self.rest, self._searched)
        if end < 0:
            self._searched = len(self.rest)
            return b""
        self.head = read_head(bytes(memoryview(self.rest)[:end]))
        del self.rest[: end + 4]
        admitted = self._admit(self.head)
        if admitted.reads_body:
            self._reader = body_reader(self.head, admitted.most_bytes)
            self._latest = now + BODY_SECONDS
        self.admitted = admitted
        return CONTINUE if self._reader is not None and self.head.expects and not self.rest else b""

    def _take_body(self, admitted: AuthorisedRequest, now: float) -> None:
        if self._reader is not None:
            self.deadline = min(self._latest, now + SILENCE_SECONDS)
            part = self._reader.feed(self.rest)
            if part:
                self.body.write(part)
        self.complete = self._reader is None or self._reader.complete
