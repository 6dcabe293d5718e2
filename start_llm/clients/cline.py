"""Cline's command line: an OpenAI-compatible provider in a data folder of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, Own, to_json


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    settings = {
        "provider": "openai-compatible",
        "apiKey": endpoint.key,
        "model": endpoint.model,
        "baseUrl": endpoint.v1,
    }
    providers = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {
            "openai-compatible": {
                "settings": settings,
                "updatedAt": "2026-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    return LaunchPlan(
        env={"CLINE_DATA_DIR": str(folder), "CLINE_TELEMETRY_DISABLED": "1"},
        files={folder / "settings" / "providers.json": to_json(providers)},
        arguments=("--data-dir", str(folder), "-P", "openai-compatible", "-m", endpoint.model),
    )


CLINE = AgentClient(
    name="cline",
    title="Cline",
    command="cline",
    install="npm install -g cline",
    plan=plan,
    first_prompt=7_000,
    own=Own(
        folder=".cline/data",
        variable="CLINE_DATA_DIR",
        copied=("settings/cline_mcp_settings.json",),
        anyway="skills, rules and plugins of ~/.cline",
    ),
    requests={"name": "cline", "system": r"^You are Cline\b"},
)
