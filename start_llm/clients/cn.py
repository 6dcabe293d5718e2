"""Continue's command line (`cn`): a configuration file and a home folder of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, UserConfig, to_json


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.v1,
        "apiKey": endpoint.key,
        "roles": ["chat"],
        "capabilities": ["tool_use", "image_input"] if endpoint.sees else ["tool_use"],
        "contextLength": endpoint.context,
        "defaultCompletionOptions": {"contextLength": endpoint.context, "maxTokens": endpoint.answer},
        "requestOptions": {"timeout": 3600},
    }
    path = folder / "start_llm.yaml"  # JSON is YAML too
    return LaunchPlan(
        env={
            "CONTINUE_GLOBAL_DIR": str(folder),
            "CONTINUE_METRICS_ENABLED": "0",
            "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
            "CONTINUE_CLI_AUTO_UPDATED": "true",  # else it replaces itself by its newest version
        },
        files={path: to_json({"name": "start_llm", "version": "1.0.0", "schema": "v1", "models": [model]})},
        arguments=("--config", str(path)),
    )


CN = AgentClient(
    name="cn",
    title="Continue",
    install="npm install -g @continuedev/cli",
    plan=plan,
    node=">=20",
    first_prompt=5_000,
    user_config=UserConfig(
        folder=".continue",
        variable="CONTINUE_GLOBAL_DIR",
        copied=("rules", "skills"),
        always_read="hooks of ~/.claude/settings.json",
    ),
    # Continue's cn 1.5.47
    requests={"name": "cn", "system": r"^You are an agent in the Continue CLI\b"},
)
