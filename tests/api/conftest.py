from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from start_llm.api.server import ApiServer
from start_llm.core.settings import Settings
from tests.api.fakes import FakeService, make_server
from tests.vendors import openai

Serve = Callable[..., ApiServer]
PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def serve(service: FakeService, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers with the given parts and settings around `service`; stops them at the end."""
    running: list[ApiServer] = []

    def start(parts: dict[str, Any] | None = None, /, **changes: Any) -> ApiServer:
        usual: dict[str, Any] = {"log_root": tmp_path / "logs", "start_llm_cache_dir": tmp_path / "cache"}
        settings = Settings(_env_file=None, **({"mlx_port": 0} | usual | changes))  # type: ignore[call-arg]
        server = make_server(settings, service, **(parts or {}))
        server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop(0)


@pytest.fixture
def server(serve: Serve) -> ApiServer:
    return serve()


@pytest.fixture
def client(server: ApiServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Raw:
    """A bare connection, to send what no client library would."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)

    def send(self, data: bytes | str) -> Raw:
        self.socket.sendall(data.encode() if isinstance(data, str) else data)
        return self

    def post(self, path: str, body: Any, headers: str = "") -> Raw:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        return self.send(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)

    def get(self, path: str, headers: str = "", method: str = "GET") -> Raw:
        return self.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")

    def response(self, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Reads one response: up to its Content-Length, or to the end of the connection."""
        answer = HTTPResponse(self.socket, method="HEAD" if head_only else None)
        answer.begin()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def is_closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


Connect = Callable[[ApiServer], Raw]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[Raw] = []

    def start(server: ApiServer) -> Raw:
        made.append(Raw(server.port))
        return made[-1]

    yield start
    for raw in made:
        raw.close()
