"""Qwen Code: OpenAI's variables and a home folder of its own, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import CLEARED, AgentClient, Endpoint, LaunchPlan, UserConfig, reminder, to_json


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    settings = {
        "$version": 3,
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        # Each would send the whole conversation a second time, under another system text.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "ui": {"enableFollowupSuggestions": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {
            "name": endpoint.model,
            "generationConfig": {
                "contextWindowSize": endpoint.context,
                "timeout": 3600 * 1000,
                "modalities": {"image": endpoint.sees},
            },
        },
    }
    return LaunchPlan(
        env={
            "QWEN_HOME": str(folder),
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_BASE_URL": endpoint.v1,
            "OPENAI_MODEL": endpoint.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        },
        files={folder / "settings.json": to_json(settings)},
    )


QWEN = AgentClient(
    name="qwen",
    title="Qwen Code",
    install="npm install -g @qwen-code/qwen-code",
    plan=plan,
    node=">=22",
    first_prompt=23_000,
    user_config=UserConfig(
        folder=".qwen",
        variable="QWEN_HOME",
        copied=("skills", "commands", "agents", "QWEN.md"),
        fields={"settings.json": ("mcpServers", "ui.theme")},
    ),
    # Qwen Code 0.24.4: date and folders when a process of it starts
    requests={
        "name": "qwen",
        "system": r"^You are Qwen Code\b",
        "rules": (reminder("reminder_before", "start"), CLEARED),
    },
)
