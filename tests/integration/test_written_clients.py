"""Clients that are not run here: what they send by their sources, and what they read of the answers.

Looked at in November 2026: Zed (`crates/lmstudio`), VS Code's Copilot chat (`src/extension/byok`), Roo Code
(`src/api/providers`), Goose (`crates/goose/src/providers`), Crush (`internal/discover`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.live import TOOLS, Live
from tests.oracle import script

CALL = '<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>'


def chunks(server: Live, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    yield from map(json.loads, lines[:-1])


def zed_context(server: Live) -> int:
    """It fails at a word that its enumerations do not know, and at a field that is missing."""
    (model,) = server.get("/api/v0/models").json()["data"]
    assert model["type"] in ("llm", "vlm", "embeddings") and model["compatibility_type"] in ("gguf", "mlx")
    assert model["state"] in ("loaded", "loading", "not-loaded") and model["object"] == "model"
    assert isinstance(model["publisher"], str) and "tool_use" in model["capabilities"]
    return int(model["loaded_context_length"])


def vscode_context(server: Live) -> int:
    (listed,) = server.get("/api/v0/models").json()["data"]
    model = server.get(f"/api/v0/models/{listed['id']}").json()
    assert "tool_use" in model["capabilities"]
    return int(model["max_context_length"])


def crush_context(server: Live) -> int:
    """As the type `llamacpp`."""
    (model,) = server.get("/v1/models", headers={"Authorization": "Bearer none"}).json()["data"]
    assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)
    return int(model["meta"]["n_ctx"])


def goose_context(server: Live) -> int:
    """It lists the names; the context is typed in."""
    listed = server.get("/v1/models").json()
    assert "error" not in listed
    return int(server.get(f"/v1/models/{listed['data'][0]['id']}").json()["context_length"])


USAGE = {"stream_options": {"include_usage": True}}
CACHED = {"cache_control": {"type": "ephemeral"}}
MODE = "<environment_details>\n# Mode\ncode\n</environment_details>"
SYSTEM = "You are a coding assistant. " * 20


def parts(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} | more]


# Where each asks, its first messages, its fields, and where it finds the context.
CLIENTS: dict[str, tuple[str, Callable[[str], list[Any]], dict[str, Any], Callable[[Live], int]]] = {
    "Zed": (
        "/api/v0/chat/completions",
        lambda said: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}],
        {"tool_choice": "auto", "temperature": 1.0},
        zed_context,
    ),
    "VS Code": (
        "/v1/chat/completions",
        lambda said: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}],
        {**USAGE, "temperature": 0.1, "top_p": 1, "n": 1},
        vscode_context,
    ),
    "Roo Code": (
        "/v1/chat/completions",
        lambda said: [
            {"role": "system", "content": parts(SYSTEM, **CACHED)},
            {"role": "user", "content": [*parts(said), *parts(MODE, **CACHED)]},
        ],
        {**USAGE, "temperature": 0, "parallel_tool_calls": False, "max_completion_tokens": 300},
        goose_context,
    ),
    "Goose": (
        "/v1/chat/completions",
        lambda said: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}],
        {**USAGE, "max_tokens": 300},
        goose_context,
    ),
    "Crush": (
        "/v1/chat/completions",
        lambda said: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts(said)}],
        {**USAGE, "max_tokens": 300, "tool_choice": "auto"},
        crush_context,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_it_finds_the_context_calls_a_tool_and_goes_on(servers: Callable[..., Live], name: str) -> None:
    server = servers("hybrid")
    path, first, fields, context = CLIENTS[name]
    assert context(server) == server.app.service.models()[0].context

    steps = script(f"I look.{CALL}", "It adds.")
    messages = first(f"What does a.py do, {name}? {steps}")
    body = {"model": "default", "stream": True, "tools": TOOLS, **fields}
    call: dict[str, Any] = {}
    text, reasons, ids = "", set(), []
    for chunk in chunks(server, path, body | {"messages": messages}):
        assert {"created", "model", "object", "choices"} <= chunk.keys()
        ids.append(chunk["id"])
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reasons |= {choice["finish_reason"]} - {None}
            for piece in choice["delta"].get("tool_calls") or []:
                made = call.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                made["id"] += piece.get("id") or ""
                for field in ("name", "arguments"):
                    made[field] += piece["function"].get(field) or ""
    assert text.strip() == "I look." and reasons == {"tool_calls"} and list(call) == [0]
    assert json.loads(call[0]["arguments"]) == {"path": "a.py"}
    function = {"name": call[0]["name"], "arguments": call[0]["arguments"]}
    made = [{"id": call[0]["id"], "type": "function", "function": function}]
    messages += [
        {"role": "assistant", "content": text, "tool_calls": made},
        {"role": "tool", "tool_call_id": call[0]["id"], "content": "def add(a, b): ..."},
    ]
    last = list(chunks(server, path, body | {"messages": messages}))
    assert "".join(choice["delta"].get("content") or "" for each in last for choice in each["choices"]) == "It adds."
    report = server.get(f"/v1/cache/requests/{last[0]['id']}").json()
    assert report["computed"] <= 1.05 * report["new"] + 8, report
