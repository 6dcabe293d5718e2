"""What a head must have, who asks, and who may see again what is kept of a request. Knows nothing of what is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from start_llm.core import hosts
from start_llm.core.errors import Forbidden, UnsupportedMediaType
from start_llm.core.hosts import is_loopback, presented_keys
from start_llm.core.jsontext import inner_object
from start_llm.core.protocol import SESSION_END, SESSION_FIELDS
from start_llm.files.lru import Lru

USER_FIELDS = ("user", "safety_identifier")
MOST_KEPT = 8192
FORWARDED = frozenset({"via", "x-real-ip", "true-client-ip", "x-client-ip", "x-cluster-client-ip"})
FORWARDED_BEGINNINGS = ("forwarded", "x-forwarded", "cf-")
"""Header fields, and beginnings of their names, that a proxy adds: the client behind it may be on any machine."""
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"


# --- what a head must have ----------------------------------------------------


def origin_of(headers: Mapping[str, str]) -> str | None:
    """The browser origin that may read an answer, also one that tells an error; ``None``: no page asks, or none may."""
    try:
        hosts.check_origin(headers.get("Origin", ""))
        return headers.get("Origin")
    except Forbidden:
        return None


def check_content(headers: Mapping[str, str], *, form: bool) -> None:
    """Raises UnsupportedMediaType for a body that is neither JSON nor, where one is wanted, a form with files."""
    kind = headers.get("Content-Type", "application/json").split(";", 1)[0].strip().lower()
    names_origin, by_browser = "Origin" in headers, "Sec-Fetch-Site" in headers
    if form:
        if kind != MULTIPART:
            raise UnsupportedMediaType(f"Content-Type must be {MULTIPART}, but is {kind!r}.", param="Content-Type")
        if by_browser and not names_origin:
            raise UnsupportedMediaType("A web page must send its form by a script, with an Origin.", param="Origin")
    elif kind == FORM and not names_origin and not by_browser:
        pass  # `curl -d` says so of whatever it sends; a web page's form would name its origin
    elif kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type must be application/json, but is {kind!r}.", param="Content-Type")
    coding = headers.get("Content-Encoding", "identity").lower()
    if coding not in {"", "identity"}:
        raise UnsupportedMediaType(
            f"Content-Encoding {coding!r} is not supported; send the body as it is.", param="Content-Encoding"
        )


# --- who asks, as a digest of the key and of the user that the client names -----


def owner_of(data: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """`ChatRequest.owner`: SHA-256 in hex, 64 digits; ``None`` where the request has neither key nor user."""
    key, user = next(iter(presented_keys(headers)), None), user_of(data)
    return None if key is None and user is None else digest(key, user)


def digest(*parts: str | None) -> str:
    """SHA-256 in hex. A missing part and an empty one differ."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def user_of(data: Mapping[str, Any]) -> str | None:
    """OpenAI's ``user`` (or its newer name), else Anthropic's ``metadata.user_id``."""
    for name in USER_FIELDS:
        if isinstance(data.get(name), str) and data[name]:
            return str(data[name])
    metadata = data.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return (_without_session(user) or None) if isinstance(user, str) and user else None


def _without_session(user: str) -> str:
    """Claude Code puts its session into the user's id. A session that is resumed is still the same user's. Empty where
    there is nothing but a session."""
    value = inner_object(user)
    if value is None:
        return SESSION_END.sub("", user)
    others = {name: value[name] for name in sorted(value) if name not in SESSION_FIELDS}
    return json.dumps(others) if others else ""


# --- who may see it again -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks: all that decides what of requests is shown to it. Routes look at nothing else.

    Attributes:
        scope: whose is what this request makes: a digest of its API key, ``""`` for a client of this machine that has
            none, ``None``: nobody's, it cannot be seen again.
        owner: of requests whose words it may read: `owner_of` its key and the user that it names by ``?user=``.
        sees_all: may see everybody's places and numbers, the log and the settings, and load and unload models.
        reads_all: may read everybody's words.
        page: the origin of a web page that is not the server's own; empty: no such page asks.
    """

    scope: str | None
    owner: str | None = None
    sees_all: bool = False
    reads_all: bool = False
    page: str = ""

    def check_sees_all(self) -> None:
        """Raises Forbidden for who may not see everything, and for other web pages."""
        if self.page:
            raise Forbidden(
                f"Origin {self.page[:80]!r} may not do this; only the server's own page may.", param="Origin"
            )
        if not self.sees_all:
            raise Forbidden(
                "This is shown to who may see everything: with API_KEY whoever has it, without it a client of this "
                "machine that sends no key."
            )

    def check_sees_own(self) -> None:
        """Raises Forbidden for who may see nothing again, not even what it made."""
        if self.scope is None and self.page:
            raise Forbidden(
                f"Without API_KEY, Origin {self.page[:80]!r} may not see what was requested.", param="Origin"
            )
        if self.scope is None:
            raise Forbidden("A server without API_KEY shows only clients of its own machine what was requested.")


NOBODY = Visitor(None)


def visitor_of(headers: Mapping[str, str], peer: str, api_key: str | None, query: str = "") -> Visitor:
    """Of a request that was let in; `peer` is the client's address.

    Without `api_key` the keys that clients send are checked by nobody: they tell clients of this machine apart. A
    client from elsewhere, one behind a proxy, and a web page of this machine that is not the server's own see nothing
    again. With `api_key` such a page sees what its key made.
    """
    origin = headers.get("Origin", "")
    page = "" if not origin or urlsplit(origin).netloc == headers.get("Host") else origin
    owner = owner_of({"user": parse_qs(query).get("user", [""])[0]}, headers)
    if api_key is not None:  # whoever was let in has the key; users of it have words of their own
        return Visitor(digest(api_key), owner, sees_all=not page, page=page)
    names = {name.lower() for name in headers}
    forwarded = not FORWARDED.isdisjoint(names) or any(name.startswith(FORWARDED_BEGINNINGS) for name in names)
    if forwarded or page or not is_loopback(peer):
        return Visitor(None, page=page)
    key = next(iter(presented_keys(headers)), None)
    return Visitor("", owner, sees_all=True, reads_all=True) if key is None else Visitor(digest(key), owner)


class RequestOwners:
    """Who made which request; the last `MOST_KEPT` of them. Thread-safe."""

    def __init__(self) -> None:
        self._made: Lru[str, tuple[str | None, str | None]] = Lru(MOST_KEPT)  # scope, and `ChatRequest.owner`

    def remember(self, request_id: str, visitor: Visitor, owner: str | None) -> None:
        """`owner`: see `owner_of`; the request's words are for this owner."""
        self._made.put(request_id, (visitor.scope, owner))

    def ending(self, visitor: Visitor, end: str) -> list[str]:
        """Ids of the requests of `visitor` that end with `end`: the terminal and the page show only that end."""
        return [each for each in self._made if each.endswith(end) and self.may_see(visitor, each)]

    def may_see(self, visitor: Visitor, request_id: str) -> bool:
        """Places and numbers."""
        scope, _ = self._made.get(request_id) or (None, None)
        return visitor.sees_all or (visitor.scope is not None and scope == visitor.scope)

    def may_read(self, visitor: Visitor, request_id: str) -> bool:
        """Words, too."""
        made = self._made.get(request_id)
        return visitor.reads_all or (visitor.scope is not None and made == (visitor.scope, visitor.owner))
