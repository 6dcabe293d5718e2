"""What is kept of a request, and who may see it again: whoever has the key that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from start_llm.api.http.owner import digest, presented_key
from start_llm.core.hosts import is_loopback
from start_llm.files.lru import Lru

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
        self._scopes: Lru[str, str | None] = Lru(MOST_KEPT)

    def remember(self, request_ids: Iterable[str], visitor: Visitor) -> None:
        for request_id in request_ids:
            self._scopes.put(request_id, visitor.scope)

    def ending(self, visitor: Visitor, end: str) -> list[str]:
        """The requests of `visitor` whose ids end so: the terminal and the page show the end only."""
        return [each for each in self._scopes if each.endswith(end) and self.may_see(visitor, each)]

    def may_see(self, visitor: Visitor, request_id: str) -> bool:
        return visitor.sees_all or (visitor.scope is not None and self._scopes.get(request_id) == visitor.scope)
