"""Recorded requests of real clients translate without an error, and nothing in them is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.request import ChatRequest, is_side_request, names_tools
from tests.api.fakes import read

FOLDER = Path(os.environ.get("START_LLM_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


def recorded(client: str) -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob(f"{client}/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def texts(value: Any, name: str = "") -> Iterator[str]:
    """Every string that a person or a model wrote."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "input":  # arguments are JSON text, checked elsewhere
                continue
            yield from texts(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, name)
    elif isinstance(value, str) and name in {"text", "content", "thinking", "reasoning_content"}:
        yield value


def translate(client: str, record: dict[str, Any]) -> ChatRequest:
    return read("messages" if client == "claude" else "chat", record["headers"], **record["body"])


@pytest.mark.parametrize(("client", "titles"), [("pi", 0), ("claude", 0), ("opencode", 3), ("openclaw", 0)])
def test_every_request_translates_and_side_requests_are_titles(client: str, titles: int) -> None:
    """OpenCode's fourth title shows a picture, which a small model may not see."""
    if not (FOLDER / client).is_dir():
        pytest.skip("no recorded traces here")
    found = []
    for record in recorded(client):
        request = translate(client, record)
        check(request, record["body"])
        if is_side_request(request) and not names_tools(record["body"]):
            found.append(request)
    assert len(found) == titles
    assert all(request.messages[0].content.startswith("You are a title generator.") for request in found)


def check(request: ChatRequest, body: dict[str, Any]) -> None:
    shown = "\n".join(f"{message.content}\n{message.reasoning or ''}" for message in request.messages)
    for text in texts([body["messages"], body.get("system")]):
        assert text in shown
    assert len(request.tools) == sum(not tool.get("defer_loading") for tool in body.get("tools") or [])
    assert "cache_control" not in shown
    assert all(message.tool_call_id for message in request.messages if message.role == "tool")
