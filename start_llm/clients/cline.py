"""Cline's command line: an OpenAI-compatible provider in a data folder of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, UserConfig, to_json

NAME = "openai-compatible"


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    settings = {"provider": NAME, "apiKey": endpoint.key, "model": endpoint.model, "baseUrl": endpoint.v1}
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": NAME, "modes": {}, "providers": {NAME: provider}}
    return LaunchPlan(
        env={"CLINE_DATA_DIR": str(folder), "CLINE_TELEMETRY_DISABLED": "1"},
        files={folder / "settings" / "providers.json": to_json(providers)},
        arguments=("--data-dir", str(folder), "-P", NAME, "-m", endpoint.model),
    )


CLINE = AgentClient(
    name="cline",
    title="Cline",
    install="npm install -g cline",
    plan=plan,
    first_prompt=7_000,
    user_config=UserConfig(
        folder=".cline/data",
        variable="CLINE_DATA_DIR",
        copied=("settings/cline_mcp_settings.json",),
        always_read="skills, rules and plugins of ~/.cline",
    ),
    requests={"name": "cline", "system": r"^You are Cline\b"},
)
