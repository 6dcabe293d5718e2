"""Who may ask: API key, Host and Origin. Says nothing about what is asked."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping

from start_llm.core.errors import BadRequest, Forbidden, Unauthorized
from start_llm.core.hosts import host_allowed, host_name, is_loopback, origin_allowed
from start_llm.core.settings import Settings, SettingsError


def presented_keys(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The bearer token and the ``x-api-key``, as far as they are there."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return tuple(key for key in (bearer, headers.get("x-api-key", "").strip()) if key)


def check_key(headers: Mapping[str, str], api_key: str | None) -> None:
    """Raises Unauthorized where a key is set and neither ``Authorization`` nor ``x-api-key`` carries it."""
    if api_key is None:
        return
    # Heads are decoded as Latin-1, whatever bytes the client sent.
    offered = (key.encode("latin-1", "replace") for key in presented_keys(headers))
    if not any(hmac.compare_digest(key, api_key.encode()) for key in offered):
        raise Unauthorized("A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")


def check_host(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Refuses names that a web page could have rebound to this machine, see `hosts.host_allowed`."""
    host = headers.get("Host")
    if host is None:  # HTTP/1.0, which no browser speaks
        return
    name = host_name(host)
    if name is None:
        raise BadRequest(f"Host {host[:80]!r} is no host name.", param="Host")
    if not host_allowed(name, names=names):
        raise Forbidden(
            f"Host {host[:80]!r} is not this machine. Use localhost or an IP address, or add it to ALLOWED_HOSTS.",
            param="Host",
        )


def check_bind(settings: Settings) -> None:
    """Raises SettingsError where everybody in the network could use the server and nobody said so."""
    host = settings.mlx_host
    if host == "localhost" or is_loopback(host) or settings.api_key is not None or settings.allow_open_bind:
        return
    raise SettingsError(
        f"MLX_HOST={host!r}: other machines could use this server, and it has no API_KEY. Set API_KEY, or "
        "ALLOW_OPEN_BIND=true if everybody there may."
    )


def allowed_origin(headers: Mapping[str, str]) -> str | None:
    """The browser origin to allow, ``None`` where no browser asks. Raises Forbidden for foreign pages."""
    origin = headers.get("Origin")
    if origin is not None and not origin_allowed(origin):
        raise Forbidden(f"Origin {origin[:80]!r} may not use this server; only pages of localhost may.", param="Origin")
    return origin


def origin_of(headers: Mapping[str, str]) -> str | None:
    """The browser origin that may read an answer, also one that tells an error."""
    try:
        return allowed_origin(headers)
    except Forbidden:
        return None
