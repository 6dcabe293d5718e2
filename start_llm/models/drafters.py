"""Which files could draft for a model: its own head, a drafter's folder, a small model. Knows no MLX.

Only configurations and headers are read. `engine.decode.head` loads the files and finds out whether they fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import NotFound
from start_llm.models.background import Progress
from start_llm.models.catalog import name_of, snapshot, whole_snapshot
from start_llm.models.checkpoint import read_config, readable_config, safetensors_header
from start_llm.models.pull import find_folder
from start_llm.models.recommended import published_head


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """MTP heads of one kind, as mlx-vlm knows them."""

    drafter: str  # architecture of a folder that holds a head alone, as mlx-vlm's ``split_mtp`` writes it
    models: tuple[str, ...]  # architectures of the models that bring one
    tensors: str  # how the names of its tensors begin in these models' checkpoints


HEAD_FAMILIES = (HeadFamily("qwen3_5_mtp", ("qwen3_5", "qwen3_5_moe", "qwen3_next"), "mtp."),)
"""Those that were tried end to end; `engine.decode.upstream_heads` has what computes with each."""
LEAST_SHARED = 0.99
"""Share of a model's vocabulary that a small model must have to draft for it."""
_BESIDE = ("{0}/mtp", "{0}-mtp", "{0}-MTP")


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """`kind`: ``head``: a head, alone or in a checkpoint; ``model``: a small model."""

    kind: Literal["head", "model"]
    folder: Path
    detail: str  # what it is, for people
    nbytes: int = 0  # of its weights on disk


def own_drafter(folder: Path, config: Mapping[str, Any]) -> DrafterFiles | None:
    """The head in a model's own checkpoint, else in a folder beside it (`_BESIDE`), else a published one on disk."""
    architecture = str(config.get("model_type"))
    family = next((each for each in HEAD_FAMILIES if architecture in each.models), None)
    if family is None or config.get("model_file"):
        return None
    if nbytes := _bytes_of_tensors(folder, family.tensors):
        return DrafterFiles("head", folder, "its own MTP head", nbytes)
    for pattern in _BESIDE:
        beside = Path(pattern.format(folder))
        if _architecture(beside) == family.drafter:
            return DrafterFiles("head", beside, f"the MTP head in {beside.name}", _bytes(beside))
    published = published_head(name_of(folder))
    fetched = snapshot(published) if published else None
    if fetched is not None and _architecture(fetched) == family.drafter and (nbytes := _bytes(fetched)):
        return DrafterFiles("head", fetched, f"the MTP head {published}", nbytes)
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
    if _is_head(chosen):
        return DrafterFiles("head", chosen, f"the MTP head in {choice}", _bytes(chosen))
    if (found := own_drafter(chosen, about)) is not None:
        return replace(found, detail=f"the head in {choice}")
    return DrafterFiles("model", chosen, f"the small model {choice}", _bytes(chosen))


def other_vocabulary(large: Mapping[str, int], small: Mapping[str, int]) -> str:
    """Why a model with the vocabulary `small` cannot draft for one with `large`; empty if it can."""
    shared = [word for word in large if word in small]
    if len(shared) < LEAST_SHARED * len(large) or any(small[word] != large[word] for word in shared):
        return "its vocabulary is another one; name a small model of the same family"
    return ""


def _here(repository: str) -> Path | None:
    """A drafter's folder alone is no model that could be served."""
    found = snapshot(repository)
    if found is not None and _is_head(found) and any(found.glob("*.safetensors")):
        return found
    return whole_snapshot(repository)


def _is_head(folder: Path) -> bool:
    """It holds a head and no model."""
    return _architecture(folder) in {family.drafter for family in HEAD_FAMILIES}


def _architecture(folder: Path) -> str:
    return str(readable_config(folder).get("model_type"))


def _bytes(folder: Path) -> int:
    """A link to a file that was removed counts nothing: whoever reads the weights says that they are not there."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def _bytes_of_tensors(folder: Path, prefix: str) -> int:
    """Of a checkpoint's tensors whose names begin so."""
    headers = filter(None, map(safetensors_header, folder.glob("*.safetensors")))
    found = (tensor for header in headers for name, tensor in header.tensors.items() if name.startswith(prefix))
    return sum(tensor.end - tensor.begin for tensor in found)
