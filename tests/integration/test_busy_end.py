"""SIGTERM ends a process whose HTTP side is as busy as clients can make it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.live import ENDLESS
from tests.integration.processes import process
from tests.waiting import until

PIN = """{%- if messages[-1].content == "pin" -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- for c in range(99999) -%}
{%- endfor -%}{%- endfor -%}{%- endfor -%}{%- endif -%}"""
"""In front of a chat template: a worker that renders this never returns."""
PATH = "/v1/chat/completions"


def send(port: int, body: dict[str, object], cut: int = 0) -> socket.socket:
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw[: len(raw) - cut])
    return connection


def say(content: str, **more: object) -> dict[str, object]:
    return {"model": "default", "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.live
def test_pinned_workers_held_bodies_and_unread_answers_do_not_keep_it(
    oracle_path: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(oracle_path("plain"), tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(PIN + template.read_text())
    with process(model, tmp_path, ORACLE_SLEEP_PER_STEP="0.01") as (url, child):
        port = int(url.rsplit(":", 1)[1])
        held = [send(port, say("hi"), cut=1) for _ in range(50)]
        running = [
            send(port, say("[[long 3000]]", max_tokens=3000, stream=stream, **ENDLESS)) for stream in (True, False) * 2
        ]
        until(lambda: httpx.get(f"{url}/health", timeout=20).json()["running"] == 4)
        pinned = [send(port, say("pin")) for _ in range(2)]
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0  # these workers never return
        said = (tmp_path / "said").read_text()
        assert "abort" not in said and "Fatal" not in said and "Traceback" not in said, said
        for connection in [*held, *running, *pinned]:
            connection.close()
