"""Recorded chat-completions requests of real clients, as this room's types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import ChatRequest


def folder() -> Path | None:
    path = Path(os.environ.get("START_LLM_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    return path if path.is_dir() else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def _calls(calls: list[dict[str, Any]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls)


def _message(message: dict[str, Any]) -> Message:
    return Message(
        "system" if message["role"] == "developer" else message["role"],
        _text(message.get("content")),
        message.get("reasoning_content"),
        _calls(message.get("tool_calls") or []),
        message.get("tool_call_id"),
    )


def requests(client: str) -> Iterator[tuple[str, ChatRequest, Message]]:
    """Every request of a client in the order of its runs, with what was answered."""
    root = folder()
    assert root is not None
    for path in sorted((root / client).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            body, reply = item["body"], item["reply"]
            if not item["path"].endswith("/chat/completions"):
                continue
            tools = tuple(
                Tool(t["function"]["name"], t["function"].get("description", ""), t["function"].get("parameters", {}))
                for t in body.get("tools", [])
            )
            messages = tuple(_message(message) for message in body["messages"])
            answer = Message(
                "assistant",
                reply["text"],
                reply["reasoning"] or None,
                tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in reply["calls"]),
            )
            yield f"{path.stem}#{item['n']}", ChatRequest("id", "chat", "m", messages, tools), answer
