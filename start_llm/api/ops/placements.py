"""Which conversations the proxies have placed at this server, so that proxies that share no memory decide alike.

A proxy asks all its nodes before it chooses one (`proxy/routing`), and then places the conversation at that node. If
another proxy was quicker, the place is refused, and the proxy asks again. The server knows conversations by digests
only, and it checks nothing: a wrong answer costs computing, never an answer. It does not know what is stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from start_llm.api.common.fields import BodyModel
from start_llm.files.lru import Lru

ACTIVE_SECONDS = 3600.0
"""A conversation that was placed so long ago does not count any more."""
MOST_PLACED = 8192
Digest = Annotated[str, Field(min_length=1, max_length=64)]


class PlacementBody(BodyModel):
    """What a proxy says of a conversation, in digests that it makes.

    Attributes:
        conversation: names of it, the surest first.
        opening: of its tools and system text.
        place: the server is to take the conversation; else this is only a question.
        revision: `Placement.revision` of the answer that the proxy decided by. The conversation is placed only if no
            other was placed since. ``null``: it is placed in any case.
    """

    conversation: Annotated[list[Digest], Field(max_length=4)]
    opening: Digest | None = None
    place: bool | None = None
    revision: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What the server knew before this conversation was placed.

    Attributes:
        known: index in `PlacementBody.conversation` of the first name that is placed here; ``None``: none is.
        known_seconds: since that name was placed.
        opening_seconds: since a conversation with these tools and this system text was placed; ``None``: none was.
        conversations: placed in the last `ACTIVE_SECONDS`.
        revision: grows with each conversation that is placed.
        placed: this conversation was placed here now.
    """

    known: int | None
    known_seconds: float | None
    opening_seconds: float | None
    conversations: int
    revision: int
    placed: bool


class Placements:
    """Thread-safe. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._names: Lru[str, float] = Lru(MOST_PLACED)
        self._openings: Lru[str, float] = Lru(MOST_PLACED)
        self._conversations: Lru[str, float] = Lru(MOST_PLACED)  # by the surest name
        self._revision = 0

    def ask(self, body: PlacementBody) -> Placement:
        """Answers, and places the conversation if the proxy wants it and may."""
        with self._lock:
            now = self._clock()
            placed = bool(body.place) and body.revision in {None, self._revision}
            known = next((place for place, name in enumerate(body.conversation) if name in self._names), None)
            found = Placement(
                known,
                None if known is None else self._age(self._names, body.conversation[known], now),
                self._age(self._openings, body.opening, now),
                sum(now - since < ACTIVE_SECONDS for since in self._conversations.values()),
                self._revision,
                placed,
            )
            if placed:
                self._place(body.conversation, body.opening, now)
            return found

    def _place(self, names: Sequence[str], opening: str | None, now: float) -> None:
        self._revision += 1
        for name in names:
            self._names.put(name, now)
        for name in names[:1]:
            self._conversations.put(name, now)
        if opening:
            self._openings.put(opening, now)

    @staticmethod
    def _age(times: Lru[str, float], name: str | None, now: float) -> float | None:
        since = times.get(name) if name else None
        return None if since is None else round(now - since, 3)
