"""The agents that are known, one TOML file each (`agent.AgentClient` has its keys). Adding an agent is adding a file.

A file says how its requests are known, what it changes in them, and how it is launched. Standard library only: the
command line lists the agents.
"""

import tomllib
from pathlib import Path

from start_llm.clients.agent import AgentClient, described

_ORDER = ("claude", "codex", "opencode", "openclaw", "pi", "qwen", "cline", "kilo", "cn", "aider")

CLIENTS: dict[str, AgentClient] = {
    name: described(name, tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))) for name in _ORDER
}
