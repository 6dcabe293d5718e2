"""OpenClaw: a state folder, a configuration and a gateway of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Endpoint, LaunchPlan, UserConfig, rule, to_json
from start_llm.clients.pi import pi_provider

REQUEST_SECONDS = 3600
# A gateway takes this port and the 110 above it; that of a user's own OpenClaw stands on 18789.
GATEWAY_PORT = 18909
# Tools of the owner alone. The turn in which a sub-agent's answer comes back is not the owner's: with these it would
# have another tool list and another system text, and its whole history would be computed anew.
OWNERS_TOOLS = [
    *("automations", "conversations_list", "conversations_send", "conversations_turn", "gateway", "intent"),
    *("mobile_ui", "nodes", "openclaw", "plugins", "portal", "sessions", "terminal", "transcripts"),
]


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    provider = pi_provider(endpoint, "${START_LLM_KEY}", name=endpoint.model, cost=free)
    provider["timeoutSeconds"] = REQUEST_SECONDS
    config = {
        "models": {"mode": "merge", "providers": {"start_llm": provider}, "catalogRefresh": {"enabled": False}},
        "agents": {
            "defaults": {
                "model": {"primary": f"start_llm/{endpoint.model}"},
                "workspace": str(folder / "workspace"),
                "timeoutSeconds": REQUEST_SECONDS,
                "heartbeat": {"every": "0m"},  # no turns that nobody asked for
            }
        },
        "gateway": {"mode": "local", "bind": "loopback", "port": GATEWAY_PORT, "auth": {"mode": "token"}},
        "tools": {"deny": OWNERS_TOOLS},
        "update": {"checkOnStart": False},
        "logging": {"file": str(folder / "openclaw.log")},
    }
    path = folder / "openclaw.json"
    return LaunchPlan(
        env={
            "OPENCLAW_STATE_DIR": str(folder),
            "OPENCLAW_CONFIG_PATH": str(path),
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "OPENCLAW_DISABLE_BONJOUR": "1",
            "OPENCLAW_GATEWAY_PORT": str(GATEWAY_PORT),
            "START_LLM_KEY": endpoint.key,
        },
        unset=("OPENCLAW_GATEWAY_URL", "OPENCLAW_GATEWAY_PASSWORD"),
        files={path: to_json(config)},
        secrets={"OPENCLAW_GATEWAY_TOKEN": folder / "gateway-token"},
    )


OPENCLAW = AgentClient(
    name="openclaw",
    title="OpenClaw",
    install="npm install -g openclaw",
    plan=plan,
    node=">=24.16 <25 || >=26.1",
    first_prompt=19_000,
    user_config=UserConfig(
        folder=".openclaw",
        variable="OPENCLAW_STATE_DIR",
        copied=("skills",),
        fields={"openclaw.json": ("mcp.servers", "skills")},
    ),
    # OpenClaw 2026.9.6; message ids and stats as in the versions before it
    requests={
        "name": "openclaw",
        "system": r"^<!-- openclaw:|^You are a personal assistant running inside OpenClaw\b",
        "rules": (
            rule(
                "internal_context",
                "transient",
                "whole",
                r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
                closes=r"<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*\Z",
            ),
            rule("metadata", "stamp", "start", r"[\w ]+ \(untrusted[^)\n]*\):[ \t]*\n```", closes=r"^```[ \t]*$"),
            rule("message_id", "stamp", "end", r"\[message_id: ?[^\]\n]+\][ \t]*"),
            rule("runtime", "state", "end", r"Runtime: agent=[^|\n]+\| session=.*"),
            rule("subagent_stats", "stamp", "line", r"[ \t]*Stats: runtime\b.*"),
            CLEARED,
        ),
    },
)
