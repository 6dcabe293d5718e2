"""Codex: Responses, by `-c` options and a catalogue of one model: `config.toml` stays Codex's own (folder trust)."""

from __future__ import annotations

import json
from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, UserConfig, to_json

MOST_OUTPUT = 10_000
"""Tokens of a command's output that Codex shows: as many as for its vendor's models, and a tenth of a small context."""
INSTRUCTIONS = """\
You are a coding agent. You run in the Codex CLI, in a terminal on the user's computer. You share a workspace with \
the user.

- Work until the user's task is done. Then stop. Ask only where you cannot find out by yourself.
- Read the code before you change it. Search with `rg` if it is installed.
- Follow the rules of the AGENTS.md files. The rules of a file hold for its folder and for what is below it. A deeper \
file goes first. The words of the user go before all of them.
- Find the cause of a fault and mend that. Change nothing that the task does not need. Keep the style of the code.
- Edit files with `apply_patch`. Paths in a patch are relative. It writes the file or says what is wrong, so there is \
no need to read it again.
- Do not undo changes that are not yours. Do not commit and do not make branches, unless the user asks for it.
- Try what you changed: run its tests first, then others, then the formatter of the project.
- Before a group of commands, say in one sentence what you do next.
- At the end, say shortly what you changed, where, and how you tried it. Name files as `path:line`.
"""
"""A catalogue must bring instructions; those of Codex's fallback are 3,600 tokens, and know no `apply_patch`."""


def catalogue(endpoint: Endpoint) -> str:
    """The model as `codex debug models` of 0.169.0 lists one: fields that it requires, and those that differ here."""
    model = {
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "base_instructions": INSTRUCTIONS,
        "context_window": endpoint.context,
        "max_context_window": endpoint.context,
        "truncation_policy": {"mode": "tokens", "limit": min(MOST_OUTPUT, endpoint.context // 10)},
        "supported_reasoning_levels": [
            {"effort": effort, "description": f"{effort} effort"} for effort in ("low", "medium", "high")
        ],
        "support_verbosity": False,
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        "supports_search_tool": True,  # schemas of MCP tools come when the model searches them
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"],  # what becomes of an image is the server's to say
    }
    return to_json({"models": [model]})


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    provider = "model_providers.start_llm"
    listed = folder / "catalog.json"
    options: dict[str, str | int | bool] = {
        "model": endpoint.model,
        "model_provider": "start_llm",
        "model_catalog_json": str(listed),
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
        files={listed: catalogue(endpoint)},
        arguments=tuple(arguments),
    )


CODEX = AgentClient(
    name="codex",
    title="Codex",
    install="npm install -g @openai/codex",
    plan=plan,
    node=">=16",
    first_prompt=5_000,
    user_config=UserConfig(
        folder=".codex",
        variable="CODEX_HOME",
        copied=("skills", "prompts", "themes", "AGENTS.md"),
        fields={"config.toml": ("mcp_servers", "tui")},
    ),
)
