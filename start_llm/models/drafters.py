"""Which files could draft for a model: its own MTP head, a drafter's folder, a small model. Knows no MLX.

Only configurations and headers are read. `engine.decode.head` loads the files and finds out whether they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import NotFound
from start_llm.models.background import Progress
from start_llm.models.catalog import snapshot, whole_snapshot
from start_llm.models.checkpoint import INDEX, read_config, read_json, safetensors_header
from start_llm.models.pull import find_folder

OWN_HEADS = {"qwen3_5": "mtp.", "qwen3_5_moe": "mtp.", "qwen3_next": "mtp."}
"""Architectures of checkpoints with a head that is used here, and how the names of its tensors begin."""
DRAFTERS = frozenset({"qwen3_5_mtp"})
"""Architectures of folders that hold a head alone, as mlx-vlm's ``split_mtp`` writes them."""
LEAST_SHARED = 0.99
"""Share of a model's vocabulary that a small model must have to draft for it."""
_BESIDE = ("{0}/mtp", "{0}-mtp", "{0}-MTP")


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """`kind`: ``head``: an MTP head, alone or in a checkpoint; ``model``: a small model."""

    kind: Literal["head", "model"]
    folder: Path
    detail: str  # what it is, for people


def own_drafter(folder: Path, config: Mapping[str, Any]) -> DrafterFiles | None:
    """The head in a model's own checkpoint, else one in a folder beside it (`_BESIDE`)."""
    architecture = str(config.get("model_type"))
    prefix = OWN_HEADS.get(architecture)
    if prefix is None or config.get("model_file"):
        return None
    if any(name.startswith(prefix) for name in _tensors(folder)):
        return DrafterFiles("head", folder, "its own MTP head")
    for pattern in _BESIDE:
        beside = Path(pattern.format(folder))
        if _architecture(beside) in DRAFTERS:
            return DrafterFiles("head", beside, f"the MTP head in {beside.name}")
    return None


def find_drafter(choice: str, folder: Path, config: Mapping[str, Any], progress: Progress) -> DrafterFiles | None:
    """What DRAFT_MODEL, `choice`, means for the model in `folder`; it is fetched if need be. Raises NotFound."""
    if choice == "off":
        return None
    if choice == "auto":
        return own_drafter(folder, config)
    chosen = find_folder(choice, "DRAFT_MODEL", progress, _here)
    try:
        about = read_config(chosen)
    except (OSError, ValueError) as error:
        raise NotFound(f"DRAFT_MODEL={choice}: {error}") from error
    if about.get("model_type") in DRAFTERS or own_drafter(chosen, about) is not None:
        return DrafterFiles("head", chosen, f"the MTP head in {choice}")
    return DrafterFiles("model", chosen, f"the small model {choice}")


def other_vocabulary(large: Mapping[str, int], small: Mapping[str, int]) -> str:
    """Why a model with the vocabulary `small` cannot draft for one with `large`; empty if it can."""
    shared = [word for word in large if word in small]
    if len(shared) < LEAST_SHARED * len(large) or any(small[word] != large[word] for word in shared):
        return "its vocabulary is another one; name a small model of the same family"
    return ""


def _here(repository: str) -> Path | None:
    """A drafter's folder alone is no model that could be served."""
    found = snapshot(repository)
    if found is not None and _architecture(found) in DRAFTERS and any(found.glob("*.safetensors")):
        return found
    return whole_snapshot(repository)


def _architecture(folder: Path) -> str:
    try:
        return str(read_config(folder).get("model_type"))
    except (OSError, ValueError):
        return ""


def _tensors(folder: Path) -> Iterator[str]:
    """Names of a checkpoint's tensors, by its index, else by the headers of its files."""
    try:
        yield from read_json(folder / INDEX)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        for file in sorted(folder.glob("*.safetensors")):
            header = safetensors_header(file)
            if header is not None:
                yield from header.tensors
