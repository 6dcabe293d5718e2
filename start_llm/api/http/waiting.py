"""Connections that wait at the front: what is known of each, and all of them together."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from start_llm.api.http.reader import RequestReader


@dataclass(eq=False, slots=True)
class Waiting:
    """A connection that waits: for a request, for its client to take an answer, or to be drained.

    Attributes:
        deadline: when it is given up, on the monotonic clock.
        latest: the deadline of an answer does not move beyond this.
        outgoing: of an answer, not yet taken by the client.
        keep: after that it may send its next request; else it is drained.
        draining: answered, but its client may still be sending: closed when it has ended. Closing at once would send a
            reset, which can overtake the answer.
    """

    connection: socket.socket
    address: tuple[str, int]
    arrival: RequestReader
    deadline: float
    latest: float = 0.0
    outgoing: bytes = b""
    keep: bool = True
    draining: bool = False

    @property
    def is_arriving(self) -> bool:
        return self.arrival.begun and not self.outgoing and not self.draining

    @property
    def is_idle(self) -> bool:
        return not self.arrival.begun and not self.outgoing and not self.draining

    def close(self) -> None:
        self.arrival.body.close()
        self.connection.close()


class Connections:
    """All that wait, oldest first. Belongs to the front thread.

    Args:
        most: that wait at the same time; one more closes the oldest.

    Attributes:
        dropped: how many were closed to make room.
    """

    def __init__(self, selector: selectors.BaseSelector, most: int) -> None:
        self.dropped = 0
        self._selector = selector
        self._most = most
        self._waiting: dict[Waiting, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: object) -> bool:
        return waiting in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """Over those that wait now, whatever becomes of them meanwhile."""
        return iter(list(self._waiting))

    def add(self, waiting: Waiting) -> None:
        while len(self._waiting) >= self._most:
            self.drop_oldest()
        self._waiting[waiting] = None
        self._selector.register(waiting.connection, selectors.EVENT_READ, waiting)

    def look_for(self, waiting: Waiting, events: int) -> None:
        """What its socket is to be ready for: ``selectors.EVENT_READ`` or ``EVENT_WRITE``."""
        self._selector.modify(waiting.connection, events, waiting)

    def remove(self, waiting: Waiting) -> None:
        """Its connection stays open, for somebody else."""
        if waiting in self._waiting:
            del self._waiting[waiting]
            self._selector.unregister(waiting.connection)

    def drop(self, waiting: Waiting) -> None:
        self.remove(waiting)
        waiting.close()

    def drop_oldest(self) -> None:
        if self._waiting:
            self.dropped += 1
            self.drop(next(iter(self._waiting)))
