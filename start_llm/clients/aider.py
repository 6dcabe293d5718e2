"""aider: chat completions through its own LiteLLM, by environment variables and two small files (JSON is YAML too)."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from start_llm.clients.agent import AgentClient, Declared, Endpoint, LaunchPlan, UserConfig, rule, to_json


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


def _message(name: str, opens: str, reply: str) -> Declared:
    """A rule for a message that aider moves, and the reply to it that it makes up."""
    return rule(name, "state", "whole", opens, reply=reply, moves=True)


AIDER = AgentClient(
    name="aider",
    title="aider",
    install="uv tool install --python 3.12 aider-chat",
    plan=plan,
    first_prompt=4_000,
    user_config=UserConfig(always_read="~/.aider.conf.yml"),
    # aider 0.86.2
    requests={
        "name": "aider",
        "system": r"^Act as an expert (?:software developer|code analyst|architect engineer)\b"
        r"|^You are an expert on the AI coding tool called Aider\b",
        "rules": (
            _message(
                "aider_files",
                r"I have \*added these files to the chat\*.*|I am not sharing any files that you can edit yet\.",
                r"Ok, any changes I propose will be to those files\.|Ok\.",
            ),
            _message(
                "aider_no_files", r"Don't try and edit any existing code without asking me\b.*", r"Ok, based on .*"
            ),
            _message(
                "aider_read_only",
                r"Here are some READ ONLY files, provided for your reference\.",
                r"Ok, I will use these files as references\.",
            ),
            _message(
                "aider_map",
                r"Here are summaries of some files present in my git repository\."
                r"|I am working with you on code in a git repository\.",
                r"Ok, I won't try and edit those files without asking first\.",
            ),
            rule(
                "aider_edit_rules",
                "state",
                "rest",
                r"# (?:\*SEARCH/REPLACE block\*|V4A Diff Format|File editing) [Rr]ules:"
                r"|To suggest changes to a file you MUST return the entire content of the updated file\.",
                moves=True,
            ),
        ),
    },
)
