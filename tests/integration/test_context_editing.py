"""``context_management`` over a conversation: cleared results cost nothing, and what is short of room goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.live import Live
from tests.oracle import script

EDITS = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2}}]}
TOOLS = [{"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_each_turn_costs_what_is_new_in_it(servers: Callable[..., Live], kind: str) -> None:
    server = servers(kind)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look, for {kind}."}]
    for number in range(7):
        last = messages[-1]["content"]
        cue = script(
            f"Step {number}." + f'<tool_call>{{"name": "read", "arguments": {{"path": "{number}.py"}}}}</tool_call>'
        )
        messages[-1]["content"] = f"{last}{cue}" if isinstance(last, str) else [*last, {"type": "text", "text": cue}]
        body = {
            "model": "default",
            "max_tokens": 100,
            "messages": messages,
            "tools": TOOLS,
            "context_management": EDITS,
        }
        answer = server.post("/v1/messages", json=body).json()
        applied = answer["context_management"]["applied_edits"]
        assert [edit["cleared_tool_uses"] for edit in applied] == ([number - 3] if number > 3 else []), answer
        report = answer["usage"]["start_llm"]
        assert number == 0 or report["computed"] <= report["new"] * 1.05 + 8, (number, report)
        call = next(block for block in answer["content"] if block["type"] == "tool_use")
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": f"result {number}: " + "line of a file " * 30,
        }
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
