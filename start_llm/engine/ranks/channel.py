"""A connection between two ranks: lists as JSON over TCP, in order. Knows nothing of what they say.

Who stands in between may read and may cut, and can do no more. Each message has a keyed digest of itself and of its
number; the key of each direction is made of the ranks' key and of a number that rank 0 draws for this connection.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Constraint, Submit, ThinkingLimit

if TYPE_CHECKING:  # few need it
    from multiprocessing.connection import Connection

START_SECONDS = 120.0  # until a rank has connected; and without a sign of life while it loads: MLX may stop all threads
SIGNS_A_LIMIT = 4  # signs of life that are sent in the time after which a silent rank is given up
LOOK_SECONDS = 0.25
_LIFE = ["alive"]
_DIGEST = 32  # bytes of SHA-256
MOST_BYTES = 256 << 20  # of a message: who stands in between could else fill the memory before its digest is looked at


class Channel:
    """Any thread may send, one thread receives. `connection`: its other end has shown that it knows the `key`.

    `leads`: this is rank 0's end. Raises OSError, EOFError.
    `limit`: seconds without a sign of life from the other end. Any thread may change it.
    """

    def __init__(self, connection: Connection, key: bytes, *, leads: bool = False) -> None:
        self.limit = START_SECONDS
        self._connection, self._sending = connection, threading.Lock()
        if leads:
            drawn = secrets.token_bytes(_DIGEST)
            connection.send_bytes(drawn)
        else:
            drawn = connection.recv_bytes(_DIGEST)
        keys = [hmac.digest(key, way + drawn, "sha256") for way in (b"from rank 0", b"to rank 0")]
        self._own_key, self._other_key = keys if leads else reversed(keys)
        self._sent = self._received = 0
        with socket.socket(fileno=os.dup(connection.fileno())) as same:  # else short messages wait for each other
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: list[Any]) -> None:
        """Raises OSError: the other end has gone."""
        self._send(json.dumps(message).encode())

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(_digest(self._own_key, self._sent, data) + data)
            self._sent += 1

    def receive(self) -> list[Any]:
        """The next message that is no sign of life.

        Raises TimeoutError: there was no sign of life for `limit`; OSError or EOFError: the other end has gone;
        ValueError: this is no message, or not the next one of the other end.
        """
        heard = time.monotonic()
        while True:
            left = max(0.0, heard + self.limit - time.monotonic())
            if self._connection.poll(min(left, LOOK_SECONDS)):  # `limit` may be less by then
                message = json.loads(self._next(self._connection.recv_bytes(MOST_BYTES)))
                if not isinstance(message, list) or not message:
                    raise ValueError("it is no list, or an empty one")  # not what it holds: that may be a prompt
                if message != _LIFE:
                    return message
                heard = time.monotonic()
            elif time.monotonic() - heard >= self.limit:  # not before it has looked: this process may have paused
                raise TimeoutError

    def _next(self, given: bytes) -> bytes:
        """What a message says. Raises ValueError: its digest is not that of the other end's next one."""
        digest, data = given[:_DIGEST], given[_DIGEST:]
        if not hmac.compare_digest(digest, _digest(self._other_key, self._received, data)):
            raise ValueError("it is not what the other rank has sent")
        self._received += 1
        return data

    def show_life(self, seconds: float) -> None:
        """From now on sends a sign of life often enough for a limit of so many seconds."""

        def show() -> None:
            try:
                while True:
                    time.sleep(seconds / SIGNS_A_LIMIT)
                    self.send(_LIFE)
            except OSError:
                return  # who receives here notices it, too

        threading.Thread(target=show, name="rank-life", daemon=True).start()

    def close(self) -> None:
        self._connection.close()


def _digest(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + data, "sha256")


_PARTS: dict[str, TypeAdapter[Any]] = {
    "prompt": TypeAdapter(Prompt),
    "sampling": TypeAdapter(Sampling),
    "constraint": TypeAdapter(Constraint | None),
    "thinking": TypeAdapter(ThinkingLimit | None),
}
_PLAIN = ("id", "max_tokens", "logprobs", "session", "owner", "one_shot", "model")
_NOT_SENT = {"images", "left_open", "compiled"}  # with several ranks a prompt has no images


def described(work: Submit) -> dict[str, Any]:
    """A request as JSON for the other ranks: without its sink, images and what was compiled of its grammar."""
    parts = {name: kind.dump_python(getattr(work, name), exclude=_NOT_SENT) for name, kind in _PARTS.items()}
    return parts | {name: getattr(work, name) for name in _PLAIN}


def submit_of(about: dict[str, Any]) -> Submit:
    """What `described` has described. Nobody gets its events: only rank 0 answers."""
    parts = {name: kind.validate_python(about[name]) for name, kind in _PARTS.items()}
    return Submit(**parts, **{name: about[name] for name in _PLAIN}, sink=lambda event: None)
