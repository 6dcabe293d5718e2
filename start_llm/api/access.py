"""Who may ask: API key, Host and Origin. Says nothing about what is asked."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from start_llm.api.owner import presented_keys
from start_llm.core.errors import BadRequest, Forbidden, Unauthorized
from start_llm.core.hosts import host_allowed, host_name, origin_allowed


def check_key(headers: Mapping[str, str], api_key: str | None) -> None:
    """Raises Unauthorized where a key is set and neither ``Authorization`` nor ``x-api-key`` carries it."""
    if api_key is None:
        return
    # Heads are decoded as Latin-1, whatever bytes the client sent.
    offered = (key.encode("latin-1", "replace") for key in presented_keys(headers))
    if not any(hmac.compare_digest(key, api_key.encode()) for key in offered):
        raise Unauthorized("A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")


def check_host(headers: Mapping[str, str], bound_to: str) -> None:
    """Refuses names that a web page could have rebound to this machine, see `hosts.host_allowed`."""
    host = headers.get("Host")
    if host is None:
        return
    name = host_name(host)
    if name is None:
        raise BadRequest(f"Host {host!r} is no host name.", param="Host")
    if not host_allowed(name, bound_to):
        raise Forbidden(f"Host {host!r} is not this machine. Use localhost or 127.0.0.1.", param="Host")


def allowed_origin(headers: Mapping[str, str]) -> str | None:
    """The browser origin to allow, ``None`` where no browser asks. Raises Forbidden for foreign pages."""
    origin = headers.get("Origin")
    if origin is not None and not origin_allowed(origin):
        raise Forbidden(f"Origin {origin!r} may not use this server; only pages of localhost may.", param="Origin")
    return origin


def origin_of(headers: Mapping[str, str]) -> str | None:
    """The browser origin that may read an answer, also one that tells an error."""
    try:
        return allowed_origin(headers)
    except Forbidden:
        return None
