"""Claude Code with 107 MCP tools: their schemas come when they are searched, and what was found works."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.install import search_path
from tests.e2e.scenarios import call
from tests.e2e.world import World
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


def test_schemas_of_mcp_tools_come_when_they_are_searched(world: World, tmp_path: Path) -> None:
    if shutil.which("claude", path=os.pathsep.join(str(folder) for folder in search_path("claude"))) is None:
        pytest.skip("Claude Code is not installed: python3.12 tests/e2e/install.py claude")
    repo = world.repository("claude")
    (tmp_path / "many.py").write_text(SERVER)
    servers = {"many": {"command": sys.executable, "args": [str(tmp_path / "many.py")]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    options = ["--permission-mode", "bypassPermissions", "--strict-mcp-config", f"--mcp-config={tmp_path / 'mcp.json'}"]
    found = "mcp__many__archive_77"
    texts = [call("ToolSearch", query=f"select:{found}", max_results=5), call(found, page=3), "It says larch."]

    def first_prompt(texts: list[str], **more: str) -> tuple[int, list[dict[str, int]], str]:
        around = replace(world, more={**world.more, "MCP_TIMEOUT": "60000", **more})
        run = around.launch("claude", repo, [*options, "-p", f"Read page 3. {script(*texts)}"], "", 180)
        assert run.code == 0, run.output[-3000:]
        main = [entry for entry in run.served if entry["tools"]]
        return main[0]["prompt"], main, json.dumps([entry["body"] for entry in run.sent])

    whole, _, _ = first_prompt(["Nothing."], ENABLE_TOOL_SEARCH="false")
    short, turns, sent = first_prompt(texts)
    print(f"\n107 MCP tools: first prompt {short:,} instead of {whole:,} tokens")
    assert whole - short >= 25_000
    assert "archive_77 page 3: larch" in sent, "the tool that was found was called, and it worked"
    assert len(turns) == 3
    for turn in turns[1:]:
        assert turn["computed"] <= 1.05 * turn["new"], turn
