"""TCP ports of this machine: which are free, who listens on one, what answers there."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
from typing import Any
from urllib.parse import urlsplit

import psutil

# Addresses to listen on that are none to connect to.
WILD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_COMMAND_LENGTH = 200
_NEVER_GIVEN = range(10_000, 32_768)  # Linux gives from 32768 on, macOS from 49152 on
_TRIES = 100


def address(host: str, port: int) -> str:
    """The URL, without a path, by which a program of this machine reaches a server that listens on `host`."""
    host = WILD_HOSTS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_error(host: str, port: int) -> OSError | UnicodeError | None:
    """Why a server cannot listen there, or ``None`` if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is not "taken"
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, UnicodeError) as error:
            return error
        return None


def is_free(host: str, port: int) -> bool:
    return bind_error(host, port) is None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, for a process that is started later.

    It is none of those that the system gives to whoever asks for any port: such a one may be taken until then.
    Raises OSError: `host` is no address of this machine.
    """
    for _ in range(_TRIES):
        port = secrets.choice(_NEVER_GIVEN)
        error = bind_error(host, port)
        if error is None:
            return port
    assert error is not None
    raise error


def listener(port: int) -> psutil.Process | None:
    """The process that listens on `port`, as far as this user may know it."""
    for process in psutil.process_iter():
        try:
            connections = process.net_connections("tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return process
        except psutil.Error:
            continue
    return None


def who_listens(port: int) -> str:
    """A name for whoever listens on `port`, for a sentence."""
    process = listener(port)
    if process is not None:
        try:
            said = " ".join(process.cmdline())[:_COMMAND_LENGTH] or process.name()
            return f"process {process.pid} ({said})"
        except psutil.Error:
            pass
    return "another user's process, or one that cannot be seen from here"


def ask_json(url: str, key: str | None = None, seconds: float = 5, given: Any = None) -> tuple[int, Any]:
    """(status, body) of a GET, or of a POST of `given` as JSON; 0 if nobody answers, ``None`` where it is no JSON."""
    parts, method, body = urlsplit(url), "GET", None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if given is not None:
        method, body = "POST", json.dumps(given).encode()
        headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request(method, parts.path or "/", body, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, None


def server_state(host: str, port: int, seconds: float = 2) -> str | None:
    """The ``state`` that a start_llm server on that port tells; ``None`` if none answers there."""
    _, body = ask_json(f"{address(host, port)}/health", seconds=seconds)
    state = body.get("state") if isinstance(body, dict) else None
    return state if isinstance(state, str) else None


def model_cards(url: str, key: str | None = None, seconds: float = 2) -> list[dict[str, Any]] | None:
    """What a server at `url` tells of its models, the main one first; ``None`` if none answers there."""
    _, body = ask_json(f"{url}/v1/models", key, seconds)
    cards = body.get("data") if isinstance(body, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else None
