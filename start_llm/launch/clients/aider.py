"""aider: chat completions through its own LiteLLM, by environment variables and two small files (JSON is YAML too)."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from start_llm.launch.plan import AgentClient, Endpoint, LaunchPlan, Own, to_json


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    name = f"openai/{endpoint.model}"
    metadata = {
        name: {
            "max_tokens": endpoint.answer,
            "max_input_tokens": endpoint.context,
            "max_output_tokens": endpoint.answer,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_vision": endpoint.sees,
        }
    }
    path, parameters = folder / "model-metadata.json", folder / "model-settings.yml"
    # aider has no name for a conversation and no calls: the server knows one by the name of the process.
    named = [{"name": "aider/extra_params", "extra_params": {"extra_headers": {"X-Session-Id": str(uuid4())}}}]
    return LaunchPlan(
        env={
            "OPENAI_API_BASE": endpoint.v1,
            "OPENAI_API_KEY": endpoint.key,
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            # Models that aider does not know would have to write whole files.
            "AIDER_EDIT_FORMAT": "diff",
            "AIDER_MODEL_METADATA_FILE": str(path),
            "AIDER_MODEL_SETTINGS_FILE": str(parameters),
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            # A long history costs nothing here; a summary of it, which aider makes early, is a call and a new text.
            "AIDER_MAX_CHAT_HISTORY_TOKENS": str(endpoint.context // 2),
            "AIDER_TIMEOUT": "3600",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        unset=("OPENAI_BASE_URL",),
        files={path: to_json(metadata), parameters: to_json(named)},
    )


AIDER = AgentClient(
    name="aider",
    title="aider",
    command="aider",
    install="python3.12 -m pip install aider-chat (or: uv tool install aider-chat)",
    plan=plan,
    first_prompt=4_000,
    own=Own(anyway="~/.aider.conf.yml"),
)
