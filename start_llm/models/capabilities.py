"""What a checkpoint can do, read from its config, tokenizer and template; no weights needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# What to assume where mlx-lm finds no parser: the form that most open models were tuned on.
FAMILY_TOOL_PARSER = {"qwen3": "hermes_json", "glm4": "glm47", "generic": "hermes_json"}
DEFAULT_CONTEXT = 32768
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Capabilities:
    """
    Attributes:
        family: ``qwen3``, ``glm4`` or ``generic``.
        context: the model's own limit in tokens.
        tool_parser, reasoning_parser: ids of `parsing.registry`.
        think_tags: the reasoning block's opening and closing text, where the tokenizer knows them.
    """

    family: str
    context: int
    tool_parser: str
    reasoning_parser: str
    think_tags: tuple[str, str] | None


def detect_family(config: Mapping[str, Any], name: str) -> str:
    """From the architecture first, from the name where the architecture is a common one."""
    words = f"{config.get('model_type', '')} {name}".lower()
    if "qwen3" in words:
        return "qwen3"
    return "glm4" if "glm4" in words or "glm-4" in words else "generic"


def context_length(config: Mapping[str, Any]) -> int:
    """The model's own limit; multimodal configs keep it in ``text_config``."""
    text = config.get("text_config") or {}
    for source in (config, text):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


def reasoning_parser(vocab: Iterable[str], think_tags: tuple[str, str] | None) -> str:
    """The id of the reasoning style. Models without tags in the vocabulary may still write ``<think>`` as text."""
    words = set(vocab)
    if {"<|channel|>", "<|message|>"} <= words:
        return "harmony"
    if {"[THINK]", "[/THINK]"} <= words:
        return "mistral"
    return "think_tag" if think_tags is None or think_tags[0] == "<think>" else "tags"


def fingerprint(folder: Path, *, extra: str = "") -> str:
    """Identifies the KV that a model makes: weights, quantisation, tokenizer, template and mlx-lm version.

    Weights are sampled (header, first and last MiB, size): reading 16 GB at every start would cost a minute.
    """
    digest = hashlib.sha256(f"mlx-lm {version('mlx-lm')} {extra}".encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in {".json", ".jinja", ".py", ".model", ".txt"} and file.name != "model.safetensors.index.json":
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            size = file.stat().st_size
            with file.open("rb") as stream:
                digest.update(f"{file.name} {size}".encode() + stream.read(_SAMPLE_BYTES))
                stream.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, ValueError."""
    data = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{folder / 'config.json'} is not a JSON object")
    return data
