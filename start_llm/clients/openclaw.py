"""OpenClaw: a state folder, a configuration and a gateway of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Declared, Endpoint, Fields, LaunchPlan, Own, to_json

REQUEST_SECONDS = 3600
# A gateway takes this port and the 110 above it; that of a user's own OpenClaw stands on 18789.
GATEWAY_PORT = 18909
# Tools of the owner alone. The turn in which a sub-agent's answer comes back is not the owner's: with these it would
# have another tool list and another system text, and its whole history would be computed anew.
OWNERS_TOOLS = (
    "automations",
    "conversations_list",
    "conversations_send",
    "conversations_turn",
    "gateway",
    "intent",
    "mobile_ui",
    "nodes",
    "openclaw",
    "plugins",
    "portal",
    "sessions",
    "terminal",
    "transcripts",
)


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": True,
        "input": endpoint.reads,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.answer,
    }
    provider = {
        "baseUrl": endpoint.v1,
        "apiKey": "${START_LLM_KEY}",
        "api": "openai-completions",
        "timeoutSeconds": REQUEST_SECONDS,
        "models": [model],
    }
    config = {
        "models": {
            "mode": "merge",
            "providers": {"start_llm": provider},
            "catalogRefresh": {"enabled": False},
        },
        "agents": {
            "defaults": {
                "model": {"primary": f"start_llm/{endpoint.model}"},
                "workspace": str(folder / "workspace"),
                "timeoutSeconds": REQUEST_SECONDS,
                "heartbeat": {"every": "0m"},  # no turns that nobody asked for
            }
        },
        "gateway": {"mode": "local", "bind": "loopback", "port": GATEWAY_PORT, "auth": {"mode": "token"}},
        "tools": {"deny": list(OWNERS_TOOLS)},
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


# OpenClaw 2026.9.6; message ids and stats as in the versions before it
REQUESTS: Declared = {
    "name": "openclaw",
    "system": r"^<!-- openclaw:|^You are a personal assistant running inside OpenClaw\b",
    "rules": (
        {
            "name": "internal_context",
            "kind": "transient",
            "place": "whole",
            "opens": r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
            "closes": r"<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*\Z",
        },
        {
            "name": "metadata",
            "kind": "stamp",
            "place": "start",
            "opens": r"[\w ]+ \(untrusted[^)\n]*\):[ \t]*\n```",
            "closes": r"^```[ \t]*$",
        },
        {"name": "message_id", "kind": "stamp", "place": "end", "opens": r"\[message_id: ?[^\]\n]+\][ \t]*"},
        {"name": "runtime", "kind": "state", "place": "end", "opens": r"Runtime: agent=[^|\n]+\| session=.*"},
        {"name": "subagent_stats", "kind": "stamp", "place": "line", "opens": r"[ \t]*Stats: runtime\b.*"},
        CLEARED,
    ),
}

OPENCLAW = AgentClient(
    name="openclaw",
    title="OpenClaw",
    command="openclaw",
    install="npm install -g openclaw",
    plan=plan,
    node=">=24.16 <25 || >=26.1",
    first_prompt=19_000,
    own=Own(
        folder=".openclaw",
        variable="OPENCLAW_STATE_DIR",
        copied=("skills",),
        fields=(Fields(("openclaw.json",), "openclaw.json", ("mcp.servers", "skills")),),
    ),
    requests=REQUESTS,
)
