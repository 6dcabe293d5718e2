"""What models lie on this disk: in the Hugging Face cache, in our own, and where MODEL_PATH points. Knows no MLX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from start_llm.core.paths import expanded
from start_llm.models.checkpoint import (
    MOST_JSON_BYTES,
    CheckpointError,
    check_audio,
    check_files,
    check_source,
    context_length,
    maps_ngrams,
    read_config,
    task_of,
    weights_on_disk,
)

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_CONTEXT = 8192
DEFAULT_REVISION = "main"
_PREFIX = "models--"
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{0,94}\w)?/)?\w([\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)
"""What the hub takes as a repository. Its own check (`huggingface_hub.utils`) costs every command its HTTP client."""
OLDER_TEMPLATE = "chat_template.json"
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json", OLDER_TEMPLATE)


@dataclass(frozen=True)
class StoredModel:
    """A model on this disk."""

    name: str  # what MODEL_PATH takes
    folder: Path
    size: int  # bytes of all its files
    context: int | None
    can: tuple[str, ...]  # tools, reasoning, images, transcription, speech
    problem: str = ""  # why it cannot be served, in a sentence; empty if it can
    weight_bytes: int = 0  # of the files that are read: its folder may hold the same weights for other libraries, too


def hub_folder(repository: str) -> Path:
    """Where the Hugging Face cache keeps a repository, whether it is there or not. Raises ValueError: no such name."""
    if not _REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository[:120]!r} is no repository's name (owner/name)")
    return Path(constants.HF_HUB_CACHE) / (_PREFIX + repository.replace("/", "--"))


def snapshot(repository: str) -> Path | None:
    """The folder of a repository's files, as far as they are here."""
    try:
        folder = hub_folder(repository)
        commit = (folder / "refs" / DEFAULT_REVISION).read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def name_of(folder: Path) -> str:
    """The repository whose files these are, if they lie in the Hugging Face cache; else the folder's own name."""
    cached = folder.parent.parent.name
    return cached.removeprefix(_PREFIX).replace("--", "/") if cached.startswith(_PREFIX) else folder.name


def whole_snapshot(repository: str) -> Path | None:
    """The folder of a repository that is here with all that is needed to serve it."""
    found = snapshot(repository)
    try:
        if found is not None:
            check_source(str(found), command="", trust_code=True)
    except CheckpointError:
        return None
    return found


def folder_of(source: str) -> Path | None:
    """Where a folder or repository lies on this disk, as far as it is here."""
    folder = expanded(source)
    return folder if os.path.exists(folder) else snapshot(source)


def expected_model(source: str | None) -> tuple[str, int | None]:
    """(the name that clients will see, the model's own context if it is here) for MODEL_PATH."""
    if source is None:
        return EMBEDDED_NAME, EMBEDDED_CONTEXT
    folder, context = folder_of(source), None
    with suppress(OSError, ValueError):
        context = None if folder is None else context_length(read_config(folder))
    return source.rstrip("/").rsplit("/", 1)[-1], context


def stored_models(cache_dir: Path, model_path: str | None = None) -> Iterator[StoredModel]:
    """Everything here that is a model, or was meant to be one: in START_LLM_CACHE_DIR, in the Hugging Face cache, and
    MODEL_PATH if it is a folder.
    """
    if model_path is not None and (folder := expanded(model_path)).is_dir():
        yield describe(str(folder), folder)
    for folder in sorted((cache_dir / "models").glob("*")):  # the embedded model, and whatever else was put there
        if not folder.name.startswith(".") and (folder / "config.json").exists():
            yield describe(str(folder), folder)
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_PREFIX}*")):
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        found = snapshot(repository) or max(
            (folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, default=None
        )
        if found is not None and (found / "config.json").exists():
            yield describe(repository, found)


def seen(cache_dir: Path) -> frozenset[tuple[str, int, int]]:
    """Differs once a model has come, has gone, or another folder has its name. Costs a look at each folder's times.

    Files that are changed in their place do not count.
    """
    hub = Path(constants.HF_HUB_CACHE)
    folders = [cache_dir / "models", *(cache_dir / "models").glob("*")]
    folders += [hub, *(folder / "refs" for folder in hub.glob(f"{_PREFIX}*"))]
    found = set()
    for folder in folders:
        with suppress(OSError):
            times, target = folder.lstat(), folder.stat()
            found.add((str(folder), times.st_mtime_ns, target.st_mtime_ns))
    return frozenset(found)


def describe(name: str, folder: Path) -> StoredModel:
    """Reads the config and headers of one."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    stored = StoredModel(name, folder, size, None, ())
    try:
        check_files(str(folder), folder)
        config = read_config(folder)
        task = task_of(config)
        whole = task is not None or "vision_config" in config  # mlx-lm reads fewer of them than mlx-vlm
        weights = folder.glob("*.safetensors" if whole else "model*.safetensors")
        nbytes = weights_on_disk(folder) if maps_ngrams(config) else sum(path.stat().st_size for path in weights)
        stored = replace(stored, weight_bytes=nbytes)
        if task is not None:
            stored = replace(stored, can=(task,))
            check_audio(str(folder), folder)
        else:
            stored = replace(stored, context=context_length(config), can=abilities(config, folder))
            check_source(str(folder), command="", trust_code=True)
    except CheckpointError as error:
        return replace(stored, problem=str(error).partition(": ")[2] or str(error))
    except (OSError, ValueError) as error:
        return replace(stored, context=None, can=(), problem=str(error))
    return stored


def is_embedded(source: str) -> bool:
    return Path(source).name.startswith(EMBEDDED_NAME)


def has_template(folder: Path) -> bool:
    """Whether the model's files have a chat template; also where they are not here yet, or there is no such folder."""
    if not (folder / "tokenizer_config.json").is_file():
        return True
    return (folder / _TEMPLATES[0]).is_file() or "chat_template" in _templates(folder)


def _templates(folder: Path) -> str:
    text = ""
    for name in _TEMPLATES:
        path = folder / name
        if path.exists():
            with path.open("rb") as file:
                text += file.read(MOST_JSON_BYTES).decode("utf-8", errors="replace")
    return text


def abilities(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """What it can do, by its config and chat template."""
    if is_embedded(str(folder)):
        return ()  # its template is ours, and has room for what so small a model does not do
    template = _templates(folder)
    thinks = any(sign in template for sign in ("<think>", "enable_thinking", "<|channel|>"))
    found = {"tools": "tools" in template, "reasoning": thinks, "images": "vision_config" in config}
    return tuple(name for name, there in found.items() if there)
