"""What is known of models without loading one. Knows no MLX."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from start_llm.models.capabilities import context_length, read_config

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_CONTEXT = 8192


def folder_of(source: str) -> Path | None:
    """Where a folder or repository lies on this disk, as far as it is here."""
    folder = Path(source).expanduser()
    if folder.exists():
        return folder
    try:
        found = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def expected_model(source: str | None) -> tuple[str, int | None]:
    """(the name that clients will see, the model's own context if it is here) for MODEL_PATH."""
    if source is None:
        return EMBEDDED_NAME, EMBEDDED_CONTEXT
    name = source.rstrip("/").rsplit("/", 1)[-1]
    folder = folder_of(source)
    try:
        return name, context_length(read_config(folder)) if folder is not None else None
    except (OSError, ValueError):
        return name, None
