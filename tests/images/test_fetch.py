"""Images by address: only from named hosts, only from public addresses, within time and size."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from start_llm.images.fetch import Fetcher, is_public
from start_llm.images.pixels import Unreadable
from tests.images.pictures import png

PICTURE = png()
Answer = Callable[[socket.socket], None]


class Server:
    """Gives every connection to `answer` once the request's head is there; ends with the test."""

    def __init__(self, answer: Answer) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heads: list[bytes] = []
        self.over = threading.Event()
        self._answer = answer
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                head = b""
                try:
                    while b"\r\n\r\n" not in head and (part := connection.recv(4096)):
                        head += part
                    self.heads.append(head)
                    self._answer(connection)
                except OSError:
                    pass

    def close(self) -> None:
        self.over.set()
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    made: list[Server] = []

    def start(answer: Answer) -> Server:
        made.append(Server(answer))
        return made[-1]

    yield start
    for server in made:
        server.close()


def reply(body: bytes, status: str = "200 OK", *headers: str) -> Answer:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers])
    return lambda connection: connection.sendall(head.encode() + b"\r\n\r\n" + body)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def trickle(start: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    return answer


def fetcher(server: Server, *, seconds: float = 30.0, most: int = 1_000_000, loopback: bool = True) -> Fetcher:
    """`loopback`: this machine counts as public, so that there is something to fetch from."""
    return Fetcher(
        frozenset({f"pictures.test:{server.port}"}),
        seconds,
        most,
        resolve=lambda host, port: ["127.0.0.1"],
        public=(lambda address: True) if loopback else is_public,
    )


def url(server: Server, path: str = "/a.png?x=1") -> str:
    return f"http://pictures.test:{server.port}{path}"


def test_an_image_is_fetched(serve: Callable[[Answer], Server]) -> None:
    server = serve(reply(PICTURE))
    assert fetcher(server).fetch(url(server)) == PICTURE
    (head,) = server.heads
    assert head.startswith(b"GET /a.png?x=1 HTTP/1.1\r\n") and b"Host: pictures.test" in head
    assert b"ookie" not in head and b"uthorization" not in head


@pytest.mark.parametrize(
    "to", ["http://127.0.0.1/", "http://169.254.169.254/latest/", "/elsewhere", "file:///etc/passwd"]
)
def test_redirects_are_not_followed(serve: Callable[[Answer], Server], to: str) -> None:
    server = serve(reply(b"", "302 Found", f"Location: {to}"))
    with pytest.raises(Unreadable, match="redirect"):
        fetcher(server).fetch(url(server))
    assert len(server.heads) == 1


def test_a_name_that_resolves_to_this_machine_is_refused(serve: Callable[[Answer], Server]) -> None:
    server = serve(reply(PICTURE))
    with pytest.raises(Unreadable, match="not public"):
        fetcher(server, loopback=False).fetch(url(server))
    assert server.heads == []


def test_one_private_address_condemns_the_name() -> None:
    made = Fetcher(frozenset({"x.test"}), 1, 10, resolve=lambda host, port: ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(Unreadable, match="not public"):
        made.fetch("http://x.test/")


def test_the_checked_address_is_the_one_connected_to(serve: Callable[[Answer], Server]) -> None:
    """DNS rebinding: the second answer is another one, and nobody asks for it."""
    good, bad = serve(reply(PICTURE)), serve(reply(b"secret"))
    asked: list[str] = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    made = Fetcher(
        frozenset({f"x.test:{good.port}"}), 30, 10**6, resolve=rebinding, public=lambda address: address == "127.0.0.1"
    )
    assert made.fetch(f"http://x.test:{good.port}/") == PICTURE
    assert len(asked) == 1 and bad.heads == []


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Head: ", b"HTTP/1."])
def test_what_trickles_is_cut_in_time(serve: Callable[[Answer], Server], start: bytes) -> None:
    server = serve(trickle(start))
    with pytest.raises(Unreadable):
        fetcher(server, seconds=0.3).fetch(url(server))


def test_a_server_that_says_nothing_is_left_in_time(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda connection: server.over.wait(60) and None)
    with pytest.raises(Unreadable, match=r"took more than 0\.3 seconds"):
        fetcher(server, seconds=0.3).fetch(url(server))


def test_an_endless_body_is_cut(serve: Callable[[Answer], Server]) -> None:
    server = serve(endless)
    with pytest.raises(Unreadable, match="more than 1,000,000 bytes"):
        fetcher(server).fetch(url(server))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(b"", "404 Not Found"), "404"),
        (reply(b"x", "200 OK", "Content-Encoding: gzip"), "compressed"),
        (lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx"), "failed"),
        (lambda connection: connection.sendall(b"nonsense\r\n\r\n"), "failed"),
        (lambda connection: None, "failed"),
    ],
)
def test_what_is_no_answer(serve: Callable[[Answer], Server], answer: Answer, words: str) -> None:
    server = serve(answer)
    with pytest.raises(Unreadable, match=words):
        fetcher(server).fetch(url(server))


@pytest.mark.parametrize(
    "address",
    [
        "http://other.test/",
        "http://x.test:22/",
        "http://x.test.evil.test/",
        "http://evil.test/x.test",
        "http://x.test@evil.test/",
        "http://user:password@x.test/",
        "ftp://x.test/",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "http://x.test:99999/",
        "http://2130706433/",
    ],
)
def test_what_is_not_named_is_never_asked_for(address: str) -> None:
    made = Fetcher(frozenset({"x.test"}), 1, 10, resolve=lambda host, port: pytest.fail(f"resolved {host}"))
    with pytest.raises(Unreadable):
        made.fetch(address)


def test_a_name_that_nobody_knows() -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror

    with pytest.raises(Unreadable, match=r"x\.test is not known"):
        Fetcher(frozenset({"x.test"}), 1, 10, resolve=unknown).fetch("https://x.test/")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
        *("2002:7f00:1::", "2002:a00:1::", "not an address", "", "0", "127.1", "2130706433", "0x7f.1", "0177.0.0.1"),
        *(
            "64:ff9b:1::7f00:1",
            "fec0::1",
            "5f00::1",
            "3fff::1",
            "192.88.99.1",
            "192.0.0.8",
            "2001::1",
            "::ffff:0.0.0.0",
        ),
        *("0:0:0:0:0:ffff:7f00:1", "::ffff:0:127.0.0.1", "100::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)
