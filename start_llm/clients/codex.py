"""Codex: Responses, all of it by `-c` options: `config.toml` stays Codex's own (it keeps folder trust there)."""

from __future__ import annotations

import json
from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, UserConfig


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    provider = "model_providers.start_llm"
    options: dict[str, str | int | bool] = {
        "model": endpoint.model,
        "model_provider": "start_llm",
        "model_context_window": endpoint.context,
        f"{provider}.name": "start_llm",
        f"{provider}.base_url": endpoint.v1,
        f"{provider}.env_key": "START_LLM_KEY",
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": 3600 * 1000,
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "web_search": "disabled",
    }
    # JSON strings, numbers and booleans are TOML values too.
    arguments = [part for name, value in options.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return LaunchPlan(
        env={"CODEX_HOME": str(folder), "START_LLM_KEY": endpoint.key},
        unset=("OPENAI_BASE_URL",),
        arguments=tuple(arguments),
    )


CODEX = AgentClient(
    name="codex",
    title="Codex",
    install="npm install -g @openai/codex",
    plan=plan,
    node=">=16",
    first_prompt=12_000,
    user_config=UserConfig(
        folder=".codex",
        variable="CODEX_HOME",
        copied=("skills", "prompts", "themes", "AGENTS.md"),
        fields={"config.toml": ("mcp_servers", "tui")},
    ),
)
