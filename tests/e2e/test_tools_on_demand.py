"""Claude Code with 107 MCP tools: their schemas come when they are searched, and what was found works."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.scenarios import call
from tests.e2e.world import World, skip_unless_installed
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SERVER = """
import json, sys
ABOUT = "Reads a page of the archive by its number and says what stands there, with the date of its last change. " * 11
SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
for line in sys.stdin:
    asked = json.loads(line)
    given = asked.get("params") or {}
    if asked["method"] == "initialize":
        told = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "many", "version": "1"}}
    elif asked["method"] == "tools/list":
        told = {"tools": [{"name": f"archive_{n}", "description": ABOUT, "inputSchema": SCHEMA} for n in range(107)]}
    elif asked["method"] == "tools/call":
        told = {"content": [{"type": "text", "text": f"{given['name']} page {given['arguments']['page']}: larch"}]}
    else:
        told = {}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": told}), flush=True)
"""


FOUND = "mcp__many__archive_77"


def claude(many: Path, folder: Path) -> list[str]:
    servers = {"many": {"command": sys.executable, "args": [str(many)]}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    options = ["--permission-mode", "bypassPermissions", "--strict-mcp-config", f"--mcp-config={folder / 'mcp.json'}"]
    return [*options, "-p"]


def codex(many: Path, folder: Path) -> list[str]:
    given = {"command": json.dumps(sys.executable), "args": json.dumps([str(many)])}
    options = [part for name, value in given.items() for part in ("-c", f"mcp_servers.many.{name}={value}")]
    return ["exec", "--dangerously-bypass-approvals-and-sandbox", *options]


# How it is run, the call by which it searches, and what turns that off.
SELECT = call("ToolSearch", query=f"select:{FOUND}", max_results=5)
AGENTS = {
    "claude": (claude, SELECT, ({"ENABLE_TOOL_SEARCH": "false"}, [])),
    "codex": (codex, call("tool_search", query="archive_77"), ({}, ["-c", "model_catalog_json={whole}"])),
}


@pytest.mark.parametrize("name", AGENTS)
def test_schemas_of_mcp_tools_come_when_they_are_searched(name: str, own_world: World, tmp_path: Path) -> None:
    skip_unless_installed(name)
    world = own_world
    how, search, (variables, off) = AGENTS[name]
    repo = world.repository(name)
    (tmp_path / "many.py").write_text(SERVER)
    options = how(tmp_path / "many.py", tmp_path)

    def run(texts: list[str], extra: list[str], more: dict[str, str]) -> tuple[list[dict[str, int]], str]:
        around = replace(world, more={**world.more, "MCP_TIMEOUT": "60000", **more})
        done = around.launch(name, repo, [*options, *extra, f"Read page 3. {script(*texts)}"], "", 180)
        assert done.code == 0, done.output[-3000:]
        return [entry for entry in done.served if entry["tools"]], json.dumps([entry["body"] for entry in done.sent])

    turns, sent = run([search, call(FOUND, page=3), "It says larch."], [], {})
    catalogue = world.folder / name / "cache" / "launch" / name / "catalog.json"
    if catalogue.exists():
        named = '"supports_search_tool": {}'
        (tmp_path / "whole").write_text(catalogue.read_text().replace(named.format("true"), named.format("false")))
    off = [each.replace("{whole}", json.dumps(str(tmp_path / "whole"))) for each in off]
    whole, _ = run(["Nothing."], off, variables)
    short, long = turns[0]["prompt"], whole[0]["prompt"]
    print(f"\n{name}, 107 MCP tools: first prompt {short:,} instead of {long:,} tokens")
    assert long - short >= 25_000
    assert "archive_77 page 3: larch" in sent, "the tool that was found was called, and it worked"
    assert len(turns) == 3
    for turn in turns[1:]:
        assert turn["computed"] <= 1.05 * turn["new"], turn
