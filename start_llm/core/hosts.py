"""Names of hosts and of web pages: which of them may use a server on this machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from start_llm.core.errors import BadRequest, Forbidden

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
LOCAL_NAMES = frozenset({"localhost", "host.docker.internal"})


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header, in lower case; ``None`` if it holds anything else beside a port."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].lower().strip("[]").removesuffix(".")


def host_allowed(name: str, *, names: Collection[str]) -> bool:
    """Whether a client may call the server by this name: a web page could have rebound another one to this machine.

    Args:
        name: in lower case.
        names: that are allowed beside this machine's own and IP addresses, `Settings.host_names`; ``*`` is any.
    """
    return is_local(name) or is_address(name) or name in names or "*" in names


def check_host(host: str, names: Collection[str]) -> None:
    """For the value of a ``Host`` header. Raises BadRequest, Forbidden."""
    name = host_name(host)
    if name is None:
        raise BadRequest(f"Host {host[:80]!r} is no host name.", param="Host")
    if not host_allowed(name, names=names):
        use = "Use localhost or an IP address, or add it to ALLOWED_HOSTS"
        raise Forbidden(f"Host {host[:80]!r} is not this machine. {use}.", param="Host")


def check_origin(origin: str) -> None:
    """For the value of an ``Origin`` header. Raises Forbidden."""
    if not origin_allowed(origin):
        raise Forbidden(f"Origin {origin[:80]!r} may not use this server; only pages of localhost may.", param="Origin")


def origin_allowed(origin: str) -> bool:
    """Whether a web page of this ``Origin`` may use the server: pages of this machine only."""
    name = _name(origin)
    return name is not None and is_local(name)


def is_local(name: str) -> bool:
    return name.lower() in LOCAL_NAMES or name.lower().endswith(".localhost") or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Whether this is an address of this machine that no other one reaches."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
