"""A session of Codex that began at its vendor's server goes on here: items that only that server can read are in it."""

from __future__ import annotations

import json

import pytest

from tests.e2e.scenarios import CODEX, call
from tests.e2e.world import World, skip_unless_installed
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
FOREIGN = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABpXk9fforeign"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "larches"}},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_l", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "function_call_output", "call_id": "call_l", "output": "birches.txt"},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_c", "name": "exec", "input": "print(1)"},
    {"type": "custom_tool_call_output", "call_id": "call_c", "output": "spruces"},
    {"type": "tool_search_call", "id": "ts_1", "call_id": None, "status": "completed", "execution": "server",
     "arguments": {"query": "trees"}},
    {"type": "tool_search_output", "id": "to_1", "call_id": None, "status": "completed", "execution": "server",
     "tools": [{"type": "function", "name": "grow", "description": "Grows alders.", "strict": False,
                "parameters": {"type": "object", "properties": {}}}]},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "revised_prompt": "maples", "result": ""},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAABpXk9fcompact"},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Yews."}]},
]  # fmt: skip


def test_a_session_with_foreign_items_is_resumed(own_world: World) -> None:
    skip_unless_installed("codex")
    world = own_world
    repo = world.repository("codex")
    data = world.folder / "codex" / "cache" / "launch" / "codex"

    def turn(how: tuple[list[str], str]) -> list[dict[str, object]]:
        run = world.launch("codex", repo, *how, 180)
        assert run.code == 0 and "Model metadata" not in run.output, run.output[-3000:]
        assert [entry["status"] for entry in run.sent] == [200] * len(run.sent) and run.sent
        return [entry["body"] for entry in run.sent]

    turn(CODEX.first(f"Say hello. {script('Hello.')}", data))
    (rollout,) = data.glob("sessions/**/*.jsonl")
    lines = rollout.read_text().splitlines()
    (window,) = {json.loads(line)["payload"]["model_context_window"] for line in lines if '"task_started"' in line}
    context = json.loads((data / "catalog.json").read_text())["models"][0]["context_window"]
    assert window == context * 95 // 100, "Codex goes by the server's context, of which it keeps 5% free"
    place = next(n for n, line in enumerate(lines) if '"role":"assistant"' in line)
    stamp = {name: json.loads(lines[place])[name] for name in ("timestamp", "ordinal")}
    told = [json.dumps(stamp | {"type": "response_item", "payload": item}) for item in FOREIGN]
    rollout.write_text("\n".join([*lines[: place + 1], *told, *lines[place + 1 :]]) + "\n")

    seen = [f"{{find: {word}}}" for word in ("larches", "birches", "spruces", "Grows alders", "Yews", "gAAAA")]
    steps = script(call("exec_command", cmd="echo " + "/".join(seen)), "Good.")
    *_, last = turn(CODEX.again(f"Which trees? {steps}", data))
    kinds = {item["type"] for item in last["input"]}  # type: ignore[attr-defined]
    assert {"reasoning", "web_search_call", "local_shell_call", "tool_search_output", "compaction"} <= kinds, kinds
    found = next(item for item in reversed(last["input"]) if item["type"] == "function_call")  # type: ignore[attr-defined,call-overload]
    counts = [each.partition("@")[0] for each in json.loads(found["arguments"])["cmd"].removeprefix("echo ").split("/")]
    assert counts == ["1", "1", "1", "1", "1", "0"], "what says something is shown, what nobody can read is not"
