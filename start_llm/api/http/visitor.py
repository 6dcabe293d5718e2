"""What is kept of a request, and who may see it again: whoever has the key that made it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from start_llm.api.http.owner import digest, presented_key
from start_llm.core.hosts import is_loopback

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
MOST_KEPT = 8192


@dataclass(frozen=True, slots=True)
class Visitor:
    """
    Attributes:
        scope: whose is what this request makes: a digest of its API key, or ``""`` for a client of this machine that
            has none; ``None``: nobody's, it cannot be seen again.
        sees_all: may see the counts of everybody's requests.
    """

    scope: str | None
    sees_all: bool = False


NOBODY = Visitor(None)


def visitor_of(headers: Mapping[str, str], peer: str, api_key: str | None) -> Visitor:
    """Of a request that was let in.

    Without `api_key` the keys that clients send are checked by nobody: they tell clients of this machine apart, and a
    client from elsewhere sees nothing again.

    Args:
        peer: the client's address.
    """
    if api_key is not None:
        return Visitor(digest(api_key))
    if not is_loopback(peer) or any(name in headers for name in FORWARDED):
        return NOBODY
    key = presented_key(headers)
    return Visitor("", sees_all=True) if key is None else Visitor(digest(key))


class Made:
    """Who made which request; the last `MOST_KEPT` of them. Thread-safe."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, request_ids: Iterable[str], visitor: Visitor) -> None:
        with self._lock:
            for request_id in request_ids:
                self._scopes[request_id] = visitor.scope
            while len(self._scopes) > MOST_KEPT:
                self._scopes.popitem(last=False)

    def ending(self, visitor: Visitor, end: str) -> list[str]:
        """The requests of `visitor` whose ids end so: the terminal and the page show the end only."""
        with self._lock:
            ids = [request_id for request_id in self._scopes if request_id.endswith(end)]
        return [request_id for request_id in ids if self.may_see(visitor, request_id)]

    def may_see(self, visitor: Visitor, request_id: str) -> bool:
        if visitor.sees_all:
            return True
        with self._lock:
            return visitor.scope is not None and self._scopes.get(request_id) == visitor.scope
