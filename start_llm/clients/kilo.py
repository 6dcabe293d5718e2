"""Kilo Code's command line: OpenCode's configuration under names of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Endpoint, LaunchPlan, UserConfig, to_json
from start_llm.clients.opencode import opencode_config, opencode_environment


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    path = folder / "kilo.json"
    return LaunchPlan(
        env={
            **opencode_environment("KILO", path, endpoint),
            "KILO_DISABLE_SESSION_INGEST": "1",  # else sessions are sent to Kilo's servers
            "KILO_TELEMETRY_LEVEL": "off",
        },
        files={path: to_json(opencode_config(endpoint))},
    )


KILO = AgentClient(
    name="kilo",
    title="Kilo Code",
    install="npm install -g @kilocode/cli",
    plan=plan,
    first_prompt=10_000,
    user_config=UserConfig(always_read="all of ~/.config/kilo: agents, commands, MCP servers, themes"),
    # Kilo Code 7.7.7
    requests={"name": "kilo", "system": r"^You are Kilo\b", "rules": (CLEARED,)},
)
