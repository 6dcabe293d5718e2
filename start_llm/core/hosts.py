"""Names of hosts and of web pages: which of them may use a server on this machine.

Standard library only, no imports of this project: the proxy's process loads this file by its path.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

LOCAL_NAMES = frozenset({"localhost", "host.docker.internal"})


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header; ``None`` if it holds none."""
    return _name(f"//{host}")


def host_allowed(name: str, bound_to: str) -> bool:
    """Whether a client may call the server by this name.

    A web page could have rebound another name to this machine. Only a server on loopback can tell: there, a client has
    no reason to use another name.
    """
    return not is_local(bound_to) or is_local(name) or is_address(name)


def origin_allowed(origin: str) -> bool:
    """Whether a web page of this ``Origin`` may use the server: pages of this machine only."""
    name = _name(origin)
    return name is not None and is_local(name)


def is_local(name: str) -> bool:
    if name.lower() in LOCAL_NAMES or name.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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
