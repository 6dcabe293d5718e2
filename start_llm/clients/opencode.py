"""OpenCode: an OpenAI-compatible provider in a configuration file of its own, chat completions. Kilo is made of it."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Endpoint, LaunchPlan, UserConfig, to_json


def opencode_config(endpoint: Endpoint) -> dict[str, object]:
    """The server as OpenCode's configuration describes it, and that of what is made of OpenCode."""
    model = {
        "name": endpoint.model,
        "reasoning": True,
        "tool_call": True,
        "attachment": endpoint.sees,
        "modalities": {"input": endpoint.reads, "output": ["text"]},
        # Reasoning comes and goes as `reasoning_content`.
        "interleaved": {"field": "reasoning_content"},
        "limit": {"context": endpoint.context, "output": endpoint.answer},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "start_llm",
        "options": {"baseURL": endpoint.v1, "apiKey": "{env:START_LLM_KEY}", "timeout": False},
        "models": {endpoint.model: model},
    }
    name = f"start_llm/{endpoint.model}"
    return {
        "model": name,
        "small_model": name,
        "provider": {"start_llm": provider},
        "enabled_providers": ["start_llm"],
        "autoupdate": False,
        "share": "disabled",
    }


def opencode_environment(prefix: str, path: Path, endpoint: Endpoint) -> dict[str, str]:
    """What OpenCode reads from the environment. `prefix`: of its variables; `path`: of the configuration file."""
    database = path.with_suffix(".db")
    off = dict.fromkeys(("DISABLE_AUTOUPDATE", "DISABLE_MODELS_FETCH", "DISABLE_SHARE"), "1")
    names = {"CONFIG": str(path), "DB": str(database)} | off
    return {f"{prefix}_{name}": value for name, value in names.items()} | {"START_LLM_KEY": endpoint.key}


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    config = {"$schema": "https://opencode.ai/config.json", **opencode_config(endpoint)}
    path = folder / "opencode.json"
    return LaunchPlan(env=opencode_environment("OPENCODE", path, endpoint), files={path: to_json(config)})


OPENCODE = AgentClient(
    name="opencode",
    title="OpenCode",
    install="npm install -g opencode-ai",
    plan=plan,
    first_prompt=10_000,
    user_config=UserConfig(always_read="all of ~/.config/opencode: agents, commands, MCP servers, themes"),
    # OpenCode 1.18.33
    requests={"name": "opencode", "system": r"^You are (?i:opencode)\b", "rules": (CLEARED,)},
)
