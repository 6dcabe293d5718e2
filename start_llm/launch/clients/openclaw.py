"""OpenClaw: a state folder and a configuration of its own, chat completions. It works in the current folder."""

from __future__ import annotations

from pathlib import Path

from start_llm.launch.plan import Client, Endpoint, Plan, to_json

REQUEST_SECONDS = 3600


def plan(endpoint: Endpoint, folder: Path) -> Plan:
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": True,
        "input": ["text"],
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
        "models": {"mode": "merge", "providers": {"start_llm": provider}},
        "agents": {
            "defaults": {
                "model": {"primary": f"start_llm/{endpoint.model}"},
                "workspace": str(folder / "workspace"),
                "timeoutSeconds": REQUEST_SECONDS,
            }
        },
        "update": {"checkOnStart": False},
    }
    path = folder / "openclaw.json"
    return Plan(
        env={
            "OPENCLAW_STATE_DIR": str(folder),
            "OPENCLAW_CONFIG_PATH": str(path),
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "OPENCLAW_DISABLE_BONJOUR": "1",
            "START_LLM_KEY": endpoint.key,
        },
        files={path: to_json(config)},
    )


OPENCLAW = Client(
    name="openclaw",
    title="OpenClaw",
    command="openclaw",
    install="npm install -g openclaw",
    plan=plan,
    node=">=24.16 <25 || >=26.1",
)
