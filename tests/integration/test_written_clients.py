"""Clients that are not run here: what they send by their sources, and what they read of the answers.

Looked at in November 2026: Zed (`crates/lmstudio`), VS Code's Copilot chat (`src/extension/byok`), Roo Code
(`src/api/providers`), Goose (`crates/goose-providers`, `openai.rs` and `formats/openai.rs`), Crush 37f36e9
(`internal/discover`, and the requests that its own tests recorded, `internal/agent/testdata`).
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


def roo_context(server: Live) -> int:
    """It lists the names; the context is typed in."""
    listed = server.get("/v1/models").json()
    return int(server.get(f"/v1/models/{listed['data'][0]['id']}").json()["context_length"])


def goose_context(server: Live) -> int:
    """Of the model of that name, or of the only one that is listed: as llama.cpp's server tells it."""
    listed = server.get("/v1/models").json()
    assert "error" not in listed
    return int(named(listed["data"], "default")["meta"]["n_ctx"])


def named(models: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [model for model in models if model["id"] == name]
    return found[0] if found else models[0] if len(models) == 1 else {}


USAGE = {"stream_options": {"include_usage": True}}
CACHED = {"cache_control": {"type": "ephemeral"}}
MODE = "<environment_details>\n# Mode\ncode\n</environment_details>"
SYSTEM = "You are a coding assistant. " * 20


def parts(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} | more]


REMINDER = "<system_reminder>This is a reminder that your todo list is currently empty.</system_reminder>"
STRICT = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]


def together(text: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "def add(a, b): ..."} for call in calls]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


def one_by_one(text: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Goose: each call in a message of its own with its result behind it; the words stand in the first."""
    back = [together(text if at == 0 else "", [call]) for at, call in enumerate(calls)]
    for call, _ in back[1:]:
        call["content"] = None
    return [message for pair in back for message in pair]


def plain(said: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]


# Where each asks, its first messages, its fields, where it finds the context, and how it sends an answer back.
Back = Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]
CLIENTS: dict[str, tuple[str, Callable[[str], list[Any]], dict[str, Any], Callable[[Live], int], Back]] = {
    "Zed": (
        "/api/v0/chat/completions",
        plain,
        {"tool_choice": "auto", "temperature": 1.0},
        zed_context,
        together,
    ),
    "VS Code": (
        "/v1/chat/completions",
        plain,
        {**USAGE, "temperature": 0.1, "top_p": 1, "n": 1},
        vscode_context,
        together,
    ),
    "Roo Code": (
        "/v1/chat/completions",
        lambda said: [
            {"role": "system", "content": parts(SYSTEM, **CACHED)},
            {"role": "user", "content": [*parts(said), *parts(MODE, **CACHED)]},
        ],
        {**USAGE, "temperature": 0, "parallel_tool_calls": False, "max_completion_tokens": 300},
        roo_context,
        together,
    ),
    "Goose": (
        "/v1/chat/completions",
        plain,
        USAGE,
        goose_context,
        one_by_one,
    ),
    "Crush": (
        "/v1/chat/completions",
        lambda said: [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REMINDER},
            {"role": "user", "content": said},
        ],
        {**USAGE, "max_tokens": 10_000, "tool_choice": "auto", "tools": STRICT},
        crush_context,
        together,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_it_finds_the_context_calls_tools_and_goes_on(servers: Callable[..., Live], name: str) -> None:
    server = servers("hybrid")
    path, first, fields, context, back = CLIENTS[name]
    assert context(server) == server.app.service.models.cards()[0].context

    messages = first(f"What does a.py do, {name}? {script(f'I look.{CALL}{CALL}', 'It adds.', 'It adds.')}")
    body = {"model": "default", "stream": True, "tools": TOOLS, **fields}
    text, reasons, calls = "", set(), {}
    for chunk in chunks(server, path, body | {"messages": messages}):
        assert {"id", "created", "model", "object", "choices"} <= chunk.keys()
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reasons |= {choice["finish_reason"]} - {None}
            for piece in choice["delta"].get("tool_calls") or []:
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                made = calls.setdefault(piece["index"], empty)
                made["id"] += piece.get("id") or ""
                for field in ("name", "arguments"):
                    made["function"][field] += piece["function"].get(field) or ""
    assert text.strip() == "I look." and reasons == {"tool_calls"}
    many = 1 if fields.get("parallel_tool_calls") is False else 2
    assert [json.loads(call["function"]["arguments"]) for call in calls.values()] == [{"path": "a.py"}] * many

    messages += back(text, list(calls.values()))
    last = list(chunks(server, path, body | {"messages": messages}))
    assert "".join(choice["delta"].get("content") or "" for each in last for choice in each["choices"]) == "It adds."
    report = server.get(f"/v1/cache/requests/{last[0]['id']}").json()
    assert report["computed"] <= 1.05 * report["new"] + 8, report
