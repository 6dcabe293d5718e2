"""What `launch` asks of a server, and a client that tells how it was run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.web import Handler, running

CLIENT_PROGRAM = """#!/bin/sh
{ env; echo "CWD=$PWD"; for word in "$@"; do echo "ARG=$word"; done; } > "$START_LLM_TEST_OUT"
exit 7
"""


@contextmanager
def serving(context: int = 50_000, scale: float = 1.0, small: dict[str, Any] | None = None) -> Iterator[int]:
    """A running stub server; gives its port.

    `small`: details of what ``claude-haiku-4-5`` means; the other model, if nothing is said.
    """
    card: dict[str, Any] = {"id": "served-name", "object": "model", "context_length": context}
    card |= {"capabilities": {"vision": True}, "details": {"source": "owner/served", "context_scale": scale}}
    other = {"id": "other-name", "context_length": 9_000, "details": {"source": "owner/other-name", "state": "stored"}}
    answers: dict[str, Any] = {
        "/health": {"status": "ok", "state": "ready"},
        "/health/readiness": {"status": "healthy"},
        "/v1/models": {"object": "list", "data": [card, other]},
        "/v1/models/claude-haiku-4-5": other | {"id": "claude-haiku-4-5"} | ({"details": small} if small else {}),
    }

    class Stub(Handler):
        def do_GET(self) -> None:
            self.answer(200 if self.path in answers else 404, answers.get(self.path))

    with running(Stub) as port:
        yield port


def make_client(folder: Path, command: str) -> None:
    """An executable `command` in `folder`."""
    path = folder / command
    path.write_text(CLIENT_PROGRAM)
    path.chmod(0o755)
