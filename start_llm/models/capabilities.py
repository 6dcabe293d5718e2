"""What a checkpoint can do, read from its config, tokenizer and template; no weights needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from start_llm.core.reasoning_tags import REASONING_STYLES

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
        tool_parser, reasoning_parser: ids of `parsing.registry`; ``tags`` is the style of `think_tags`.
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


def reasoning_parser(vocab: Iterable[str], think_tags: tuple[str, str] | None, template: str = "") -> str:
    """The id of the reasoning style, ``tags`` where only `think_tags` say it.

    What stands in the vocabulary counts first, then what the chat template writes. Models of which neither is known may
    still write ``<think>`` as text.
    """
    words = set(vocab)
    if {"<|channel|>", "<|message|>"} <= words:
        return "harmony"
    if think_tags is not None:
        return next((s.id for s in REASONING_STYLES.values() if (s.start, s.end) == think_tags), "tags")
    tagged = [style for style in REASONING_STYLES.values() if style.start]
    found = [style.id for style in tagged if {style.start, style.end} <= words]
    found += [style.id for style in tagged if style.start in template and style.end in template]
    return found[0] if found else "think_tag"


def tool_parser(known: str | None, vocab: Iterable[str], reasoning: str, family: str) -> str:
    """The id of the tool-call format.

    Args:
        known: what mlx-lm found in the template, if anything.
        reasoning: id of the reasoning style; gpt-oss's says how calls are written, too.
    """
    if known is not None:
        return known
    if reasoning == "harmony":
        return "harmony"
    if {"<|python_tag|>", "<|python_start|>"} & set(vocab):
        return "llama"
    return FAMILY_TOOL_PARSER[family]


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
