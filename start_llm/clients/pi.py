"""PI (`@mariozechner/pi-coding-agent`): a provider of its own in `models.json`, chat completions."""

from __future__ import annotations

from pathlib import Path

from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan, UserConfig, to_json

# PI sums up its history when that leaves less of the context than this; in a small one that is at once.
RESERVED_TOKENS = 16_384


def pi_provider(endpoint: Endpoint, key: str, **more: object) -> dict[str, object]:
    """The server as PI's configuration describes it, and OpenClaw's, which is made of PI, with `more` of the model."""
    model = {
        "id": endpoint.model,
        "reasoning": True,
        "input": endpoint.reads,
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.answer,
        **more,
    }
    return {"baseUrl": endpoint.v1, "api": "openai-completions", "apiKey": key, "models": [model]}


def plan(endpoint: Endpoint, folder: Path) -> LaunchPlan:
    provider = pi_provider(endpoint, "START_LLM_KEY")  # the name of a variable
    files = {folder / "models.json": to_json({"providers": {"start_llm": provider}})}
    if (share := endpoint.context // 4) < RESERVED_TOKENS:
        compaction = {"enabled": True, "reserveTokens": share, "keepRecentTokens": share}
        files[folder / "settings.json"] = to_json({"compaction": compaction})
    return LaunchPlan(
        env={
            "PI_CODING_AGENT_DIR": str(folder),
            "PI_SKIP_VERSION_CHECK": "1",  # not PI_OFFLINE: that forbids it to fetch its helpers (fd, ripgrep), too
            "PI_TELEMETRY": "0",
            "START_LLM_KEY": endpoint.key,
        },
        files=files,
        arguments=("--provider", "start_llm", "--model", endpoint.model),
    )


PI = AgentClient(
    name="pi",
    title="PI",
    install="npm install -g @mariozechner/pi-coding-agent",
    plan=plan,
    node=">=20.6",
    first_prompt=2_000,
    user_config=UserConfig(
        folder=".pi/agent",
        variable="PI_CODING_AGENT_DIR",
        copied=(
            *("skills", "prompts", "themes", "extensions"),
            *("AGENTS.md", "SYSTEM.md", "APPEND_SYSTEM.md", "keybindings.json"),
        ),
        fields={"settings.json": ("theme", "hideThinkingBlock", "quietStartup")},
    ),
    requests={"name": "pi", "system": r"\b(?:operating|running) inside pi\b"},
)
