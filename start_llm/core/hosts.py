"""Names of hosts, of web pages, and keys: who may use a server on this machine."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from start_llm.core.errors import BadRequest, Forbidden, Unauthorized

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
LOCAL_NAMES = frozenset({"localhost", "host.docker.internal"})


def check_host(host: str, names: Collection[str]) -> None:
    """For the value of a ``Host`` header: a web page could have rebound another name to this machine.

    `names` are allowed beside this machine's own and IP addresses, see `Settings.host_names`; ``*`` is any. Raises
    BadRequest: it holds anything else beside a name and a port; Forbidden: the server may not be called so.
    """
    found = _HOST.fullmatch(host)
    if found is None:
        raise BadRequest(f"Host {host[:80]!r} is no host name.", param="Host")
    name = found[1].lower().strip("[]").removesuffix(".")
    if not (is_local(name) or _ip_address(name) is not None or name in names or "*" in names):
        use = "Use localhost or an IP address, or add it to ALLOWED_HOSTS"
        raise Forbidden(f"Host {host[:80]!r} is not this machine. {use}.", param="Host")


def check_origin(origin: str) -> None:
    """For the value of an ``Origin`` header: only pages of this machine may use the server. Raises Forbidden."""
    try:
        name = urlsplit(origin).hostname
    except ValueError:
        name = None
    if name is None or not is_local(name):
        raise Forbidden(f"Origin {origin[:80]!r} may not use this server; only pages of localhost may.", param="Origin")


def presented_keys(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The bearer token and the vendors' headers for a key, as far as they are there, checked or not."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = (token if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("api-key", ""))
    return tuple(key.strip() for key in keys if key.strip())


def check_key(headers: Mapping[str, str], key: str, hint: str = "") -> None:
    """Raises Unauthorized where no header has the key. `hint`: a sentence that says where it is found."""
    # Heads are decoded as Latin-1, whatever bytes the client sent.
    offered = (each.encode("latin-1", "replace") for each in presented_keys(headers))
    if not any(hmac.compare_digest(each, key.encode()) for each in offered):
        needed = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise Unauthorized(f"{needed} {hint}".strip())


def preflight(methods: Iterable[str], headers: Mapping[str, str], *, is_page: bool) -> dict[str, str]:
    """The headers of an answer to OPTIONS. `is_page`: a web page asks, and may."""
    allowed = {"Allow": ", ".join(methods)}
    if is_page:
        asked = headers.get("Access-Control-Request-Headers") or "authorization, content-type, x-api-key"
        allowed |= {"Access-Control-Allow-Methods": allowed["Allow"], "Access-Control-Allow-Headers": asked}
        allowed["Access-Control-Max-Age"] = "600"
    return allowed


def is_local(name: str) -> bool:
    return name.lower() in LOCAL_NAMES or name.lower().endswith(".localhost") or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Whether this is an address of this machine that no other one reaches."""
    found = _ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found is not None and (mapped or found).is_loopback


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
