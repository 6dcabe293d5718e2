"""Asks a publisher of KV events for what it sent, as a router that missed it does."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from start_llm.kvcache.publisher import END

WAIT_SECONDS = 60.0


def asked_again(replay: str, first: int) -> list[Any]:
    """What the replay socket answers: (number, batch)."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(replay)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(WAIT_SECONDS * 1000)
            empty, _, number, batch = socket.recv_multipart()
            assert empty == b""
            if number == END:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)))


def all_events(replay: str, wanted: int) -> list[Any]:
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        found = [event for _, (_, batch, _) in asked_again(replay, 0) for event in batch]
        if len(found) >= wanted:
            return found
    raise AssertionError(f"{len(found)} events, not {wanted}")
