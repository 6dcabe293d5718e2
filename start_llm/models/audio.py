"""What the files of an audio model say: what it does, and whether all of them are there. Knows no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from start_llm.core.audio import AudioTask
from start_llm.models.checkpoint import AUDIO, CheckpointError, safetensors_bytes

SETTINGS: dict[AudioTask, str] = {"transcription": "TRANSCRIPTION_MODEL", "speech": "SPEECH_MODEL"}
"""Which setting names the model of a task."""
_TASKS = {kind: task for kind, setting in AUDIO.items() for task, other in SETTINGS.items() if other == setting}


def task_of(config: Mapping[str, Any]) -> AudioTask | None:
    """What an audio model that can be served does, by ``config.json``; ``None``: it is none."""
    return _TASKS.get(str(config.get("model_type", "")).lower())


def architectures_of(task: AudioTask) -> str:
    """For people."""
    return ", ".join(kind for kind, does in _TASKS.items() if does == task)


def check_audio(source: str, folder: Path) -> None:
    """Raises CheckpointError: a file is missing or cut short."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{source}: has no weights that MLX reads (*.safetensors).")
    for path in weights:
        wanted, size = safetensors_bytes(path), path.stat().st_size
        if wanted is None or size < wanted:
            raise CheckpointError(f"{source}: {path.name} is no whole safetensors file; fetch it again.")
    if not (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists():
        raise CheckpointError(f"{source}: has no tokenizer (tokenizer.json) beside its weights.")
