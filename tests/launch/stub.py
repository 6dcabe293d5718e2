"""What `launch` asks of a server, and a client that tells how it was run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CLIENT_PROGRAM = """#!/bin/sh
{ env; echo "CWD=$PWD"; for word in "$@"; do echo "ARG=$word"; done; } > "$START_LLM_TEST_OUT"
exit 7
"""


def ApiServer(
    port: int = 0, context: int = 50_000, scale: float = 1.0, small: dict[str, Any] | None = None
) -> ThreadingHTTPServer:
    """`small`: details of what ``claude-haiku-4-5`` means; the other model, if nothing is said."""
    card: dict[str, Any] = {"id": "served-name", "object": "model", "context_length": context}
    card |= {"capabilities": {"vision": True}, "details": {"source": "owner/served", "context_scale": scale}}
    other = {"id": "other-name", "context_length": 9_000, "details": {"source": "owner/other-name", "state": "stored"}}
    answers: dict[str, Any] = {
        "/health": {"status": "ok", "state": "ready"},
        "/health/readiness": {"status": "healthy"},
        "/v1/models": {"object": "list", "data": [card, other]},
        "/v1/models/claude-haiku-4-5": other | {"id": "claude-haiku-4-5"} | ({"details": small} if small else {}),
    }

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = answers.get(self.path)
            data = json.dumps(body).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextmanager
def serving(context: int = 50_000, scale: float = 1.0, small: dict[str, Any] | None = None) -> Iterator[int]:
    """A running stub server; gives its port."""
    server = ApiServer(context=context, scale=scale, small=small)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def make_client(folder: Path, command: str) -> None:
    """An executable `command` in `folder`."""
    path = folder / command
    path.write_text(CLIENT_PROGRAM)
    path.chmod(0o755)
