"""Fetches images from hosts that the user named, and from nowhere else.

A request's text decides where this server connects to, so the checks stand on what is really connected to: a name is
resolved once, every address of it must be public, and the connection goes to the address that was checked. Redirects
are not followed. The whole fetch has one time limit, whatever the other side does with its bytes.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urlsplit

from start_llm.images.pixels import Unreadable

_AT_ONCE = 4
_CHUNK = 1 << 16
_PORTS = {"http": 80, "https": 443}
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # NAT64: the last four bytes are an IPv4 address
# Special ones that the `ipaddress` of some Python takes for public: NAT64 of a network's own, site-local, segment
# routing, documentation, and the relays of 6to4.
_SPECIAL = [
    ipaddress.ip_network(text)
    for text in ("64:ff9b:1::/48", "fec0::/10", "5f00::/16", "3fff::/20", "192.88.99.0/24", "192.0.0.0/24")
]

Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: str) -> bool:
    """An address of the internet, and not of this machine, its networks, or something that leads there."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if int(ip) >> 32 == 0:  # an IPv4 address in IPv6's clothes
            return False
    special = any(ip in network for network in _SPECIAL if network.version == ip.version)
    return ip.is_global and not special and not ip.is_multicast and not ip.is_reserved


class Fetcher:
    """Thread-safe.

    Args:
        hosts: ``example.org`` (its usual ports) or ``example.org:8443``, in lower case.
        seconds: for a whole fetch, the time that the name takes apart.
        resolve, public: how names become addresses, and which of those may be connected to.
    """

    def __init__(
        self,
        hosts: frozenset[str],
        seconds: float,
        most_bytes: int,
        *,
        resolve: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = hosts
        self._seconds = seconds
        self._most = most_bytes
        self._resolve, self._public = resolve, public
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def fetch(self, url: str) -> bytes:
        """Raises Unreadable; its message says what is wrong, in words that fit behind an image's place."""
        parts, host, port = self._checked(url)
        if not self._slots.acquire(timeout=self._seconds):
            raise Unreadable("too many images are being fetched")
        try:
            return self._get(parts, host, port)
        finally:
            self._slots.release()

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """The address with its host and port, if the user named them."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").lower().rstrip(".")
            port = parts.port or _PORTS.get(parts.scheme.lower(), 0)
        except ValueError:
            raise Unreadable("not a valid address") from None
        if parts.username is not None or parts.password is not None:
            raise Unreadable("an address must not hold a password")
        usual = _PORTS.get(parts.scheme.lower()) == port
        if not host or not port or not (f"{host}:{port}" in self._hosts or (usual and host in self._hosts)):
            raise Unreadable(f"{host or 'this'} is not among IMAGE_URL_HOSTS; send the image itself as a data URL")
        return parts, host, port

    def _address(self, host: str, port: int) -> str:
        """The address to connect to. One that is not public among them condemns the name."""
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError):
            raise Unreadable(f"{host} is not known") from None
        if not addresses or not all(map(self._public, addresses)):
            raise Unreadable(f"{host} leads to an address that is not public")
        return addresses[0]

    def _get(self, parts: SplitResult, host: str, port: int) -> bytes:
        address = self._address(host, port)
        ends = time.monotonic() + self._seconds
        connection = http.client.HTTPConnection(host, port, timeout=self._seconds)
        cut: threading.Timer | None = None
        try:
            connection.sock = socket.create_connection((address, port), timeout=self._seconds)
            # Each read ends in time, but bytes that trickle have no end: the socket is closed under it.
            cut = threading.Timer(max(0.0, ends - time.monotonic()), _shut, (connection,))
            cut.daemon = True
            cut.start()
            if parts.scheme.lower() == "https":
                context, plain = ssl.create_default_context(), connection.sock
                secure = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
                connection.sock = secure
                secure.do_handshake()
            path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            return self._body(connection.getresponse(), ends)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= ends
            why = f"took more than {self._seconds:g} seconds" if late else f"failed ({type(error).__name__})"
            raise Unreadable(f"fetching it from {host} {why}") from None
        finally:
            if cut is not None:
                cut.cancel()
            connection.close()

    def _body(self, response: http.client.HTTPResponse, ends: float) -> bytes:
        if response.status != 200:
            word = "a redirect, which is not followed" if 300 <= response.status < 400 else f"{response.status}"
            raise Unreadable(f"its server answered {word}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Unreadable("its server sent it compressed")
        data = bytearray()
        while chunk := response.read1(_CHUNK):
            data += chunk
            if len(data) > self._most:
                raise Unreadable(f"it has more than {self._most:,} bytes")
            if time.monotonic() >= ends:
                break
        if time.monotonic() >= ends:  # a socket that was closed under a read looks like the end of the body
            raise TimeoutError
        if response.length:  # fewer bytes than were announced
            raise http.client.IncompleteRead(bytes(data))
        return bytes(data)


def _shut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
