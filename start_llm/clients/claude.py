"""Claude Code: Anthropic messages, by environment variables."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Endpoint, LaunchPlan, UserConfig, reminder, rule, to_json

LARGE = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL")
SMALL = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    env = dict.fromkeys(LARGE, endpoint.model) | dict.fromkeys(SMALL, endpoint.small or endpoint.model)
    if not endpoint.small:  # else each sub-agent has the model that its definition says
        env["CLAUDE_CODE_SUBAGENT_MODEL"] = endpoint.model
    env |= {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "CLAUDE_CONFIG_DIR": str(folder),
        # A billing header that differs per session stands before everything that could be shared.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It compares this with the counts that it is told.
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(round(endpoint.context * endpoint.scale)),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "API_TIMEOUT_MS": str(3600 * 1000),
    }
    # 4,000 tokens of every session: skills for the vendor's own services, told behind the first prompt, and a tool that
    # starts fleets of agents.
    defaults = {"CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1", "CLAUDE_CODE_DISABLE_WORKFLOWS": "1"}
    # Schemas of MCP tools come when they are searched. At servers of others it does that only where it is told to.
    defaults["ENABLE_TOOL_SEARCH"] = "true"
    unset = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    # Its first screens: a theme and an account. Whether a folder is trusted stays a question to the user.
    initial = {folder / ".claude.json": to_json({"hasCompletedOnboarding": True})}
    return LaunchPlan(env=env, defaults=defaults, unset=unset, initial=initial)


CLAUDE = AgentClient(
    name="claude",
    title="Claude Code",
    install="npm install -g @anthropic-ai/claude-code",
    plan=plan,
    node=">=22",
    first_prompt=12_000,
    user_config=UserConfig(
        folder=".claude",
        variable="CLAUDE_CONFIG_DIR",
        copied=("skills", "agents", "commands", "output-styles", "rules", "CLAUDE.md", "keybindings.json"),
        fields={
            ".claude.json": ("mcpServers", "theme", "editorMode"),
            "settings.json": ("outputStyle", "statusLine", "theme"),
        },
    ),
    # Claude Code 2.1.329
    requests={
        "name": "claude_code",
        "system": r"^x-anthropic-billing-header:|^You are (?:Claude Code|a Claude agent)\b",
        "rules": (
            rule("billing_header", "drop", "head", r"x-anthropic-billing-header:.*", role="system"),
            rule("cch", "drop", "head", r"cch=\w+;[ \t]*", role="system"),
            reminder("reminder_before", "start"),
            reminder("reminder_behind", "end"),
            CLEARED,
        ),
        "habits": ({"tool": "Edit", "key": "replace_all", "value": False},),
    },
)
