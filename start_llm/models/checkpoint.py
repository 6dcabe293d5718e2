"""What is wrong with a checkpoint, told before anything heavy is imported. Knows no MLX; reads only headers."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PYTORCH = ("pytorch_model*.bin", "*.pth", "*.pt", "consolidated*.safetensors")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OLLAMA = re.compile(r"(?:[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]*:[\w.-]+")
_MOST_HEADER_BYTES = 100 << 20  # what the safetensors library allows
AUDIO = {"whisper": "TRANSCRIPTION_MODEL", "soprano": "SPEECH_MODEL"}
"""Architectures of audio models that are served, and the setting that names one."""
_UNITS = ("B", "KiB", "MiB", "GiB")


class CheckpointError(ValueError):
    """This cannot be served. The message is one sentence that says why and what to do."""


def is_path(source: str) -> bool:
    """Whether MODEL_PATH can only mean a place on this disk."""
    return source.startswith(("/", "~", "./", "../")) or source in {".", ".."} or Path(source).expanduser().exists()


def check_source(source: str, *, command: str, trust_code: bool = False, known: Iterable[str] = ()) -> None:
    """Raises CheckpointError if MODEL_PATH, a folder or a repository's name, cannot be a model for this server.

    Args:
        command: the program's name, for the next command in the message.
        trust_code: Python code that the checkpoint brings may run.
        known: short names, one of which may have been meant.
    """
    if is_path(source):
        _check_place(source, Path(source).expanduser(), command, trust_code)
    elif source.lower().endswith(".gguf") or re.search(r"[-_.]gguf$", source, re.IGNORECASE):
        raise CheckpointError(f"MODEL_PATH={source}: {_gguf(command)}")
    elif _OLLAMA.fullmatch(source):
        raise CheckpointError(
            f"MODEL_PATH={source} is a name of Ollama, whose files MLX cannot read: `{command} recommend` names some "
            "for this machine."
        )
    elif not _REPOSITORY.fullmatch(source):
        near = difflib.get_close_matches(source.lower(), list(known), 1, 0.5)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise CheckpointError(
            f"MODEL_PATH={source} is neither a folder nor a repository's name (owner/name) nor a short name.{meant} "
            f"`{command} recommend` names some for this machine."
        )


def check_files(source: str, folder: Path) -> None:
    """Raises CheckpointError for a pipe, socket or device among the files: to open it could take for ever."""
    odd = next((path for path in folder.glob("*") if path.exists() and not (path.is_file() or path.is_dir())), None)
    if odd is not None:
        raise CheckpointError(f"MODEL_PATH={source}: {odd.name} is no file; fetch it again.")


def _check_place(source: str, folder: Path, command: str, trust_code: bool) -> None:
    if not folder.exists():
        raise CheckpointError(
            f"MODEL_PATH={source}: there is no such folder; give the folder of an MLX model, or owner/name to "
            "download one."
        )
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            raise CheckpointError(f"MODEL_PATH={source}: {_gguf(command)}")
        raise CheckpointError(f"MODEL_PATH={source} is a file; give the folder that holds it: {folder.parent}.")
    check_files(source, folder)
    _check_weights_kind(source, folder, command)
    config = _config(source, folder)
    if config.get("model_file"):
        if not trust_code:
            raise CheckpointError(
                f"The checkpoint {source} brings its own Python code ({config['model_file']}); set "
                "TRUST_REMOTE_CODE=true to run it, if you trust where it comes from."
            )
    else:
        _check_architecture(source, config)
    _check_whole(source, folder)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise CheckpointError(
            f"MODEL_PATH={source}: there is no tokenizer (tokenizer.json) beside the weights; fetch the "
            "whole model again, or give owner/name to download it."
        )


def _check_weights_kind(source: str, folder: Path, command: str) -> None:
    if any(folder.glob("model*.safetensors")) or (folder / INDEX).exists():
        return
    if any(folder.glob("*.gguf")):
        raise CheckpointError(f"MODEL_PATH={source}: {_gguf(command)}")
    if any(path for pattern in _PYTORCH for path in folder.glob(pattern)):
        raise CheckpointError(
            f"MODEL_PATH={source} holds weights of PyTorch only; convert them: "
            f"`mlx_lm.convert --hf-path {source} --mlx-path {source.rstrip('/')}-mlx -q`."
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"MODEL_PATH={source}: there is no config.json in that folder; give the folder of an MLX model, or "
            "owner/name to download one."
        )
    raise CheckpointError(f"MODEL_PATH={source} has no weights (model*.safetensors); give owner/name to download them.")


def _gguf(command: str) -> str:
    return (
        "GGUF files are for llama.cpp, and MLX cannot serve them; take the same model in MLX's format "
        f"(mlx-community/...), or one that `{command} recommend` names."
    )


def _config(source: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"MODEL_PATH={source}: there is no config.json in that folder.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"MODEL_PATH={source}: its config.json cannot be read ({error}); fetch it again."
        ) from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise CheckpointError(f"MODEL_PATH={source}: its config.json names no model_type, so nobody can load it.")
    return data


# --- architectures --------------------------------------------------------------------------


def _check_architecture(source: str, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind in AUDIO:
        raise CheckpointError(
            f"MODEL_PATH={source} is an audio model ({kind}), which writes no answers; serve it beside one that does: "
            f"{AUDIO[kind]}={source}."
        )
    known = architectures()
    if known and isinstance(config.get("vision_config"), dict):
        known |= architectures("mlx_vlm")
    if known and kind not in known:
        raise CheckpointError(
            f"MODEL_PATH={source}: mlx-lm does not know its architecture {kind!r}; choose another model, or update "
            "mlx-lm once it has it."
        )


def architectures(library: str = "mlx_lm") -> frozenset[str]:
    """Every ``model_type`` that the installed mlx-lm (or mlx-vlm: those with a vision part) can load, found without
    importing it; empty if it is not there."""
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(found.submodule_search_locations)))
    models = folder / "models"
    files = frozenset(path.stem for path in models.glob("*.py"))
    packages = frozenset(path.parent.name for path in models.glob("*/__init__.py"))
    return files | packages | _remapped(folder / "utils.py")


def _remapped(path: Path) -> frozenset[str]:
    """The names that it loads with another architecture's code: the keys of its MODEL_REMAPPING."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["MODEL_REMAPPING"]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


# --- weights --------------------------------------------------------------------------------


def _check_whole(source: str, folder: Path) -> None:
    paths = sorted(folder.glob("model*.safetensors"))
    missing = sorted(_indexed(folder) - {path.name for path in paths})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"MODEL_PATH={source} is not complete: {missing[0]}{more} is missing; fetch it again.")
    for path in paths:
        wanted, size = safetensors_bytes(path), path.stat().st_size
        if wanted is None:
            raise CheckpointError(f"MODEL_PATH={source}: {path.name} is no safetensors file; fetch it again.")
        if size < wanted:
            raise CheckpointError(
                f"MODEL_PATH={source}: {path.name} is cut short ({_size(size)} of {_size(wanted)}); fetch it again."
            )


def _indexed(folder: Path) -> set[str]:
    """The weight files that the index names; none where there is no index."""
    try:
        return set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Of a safetensors file.

    Attributes:
        length: bytes before the first tensor's.
        spans: where each tensor begins and ends, in bytes behind that.
    """

    length: int
    spans: tuple[tuple[int, int], ...]


def safetensors_header(path: Path) -> SafetensorsHeader | None:
    """``None`` if the file has none."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > _MOST_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        spans = tuple((int(each[0]), int(each[1])) for each in offsets)
    except (OSError, ValueError, RecursionError, struct.error, KeyError, TypeError, AttributeError, IndexError):
        return None
    return SafetensorsHeader(8 + int(length), spans) if all(0 <= begin <= end for begin, end in spans) else None


def safetensors_bytes(path: Path) -> int | None:
    """How long the file should be, by its own header; ``None`` if that is none."""
    header = safetensors_header(path)
    return None if header is None else header.length + max((end for _, end in header.spans), default=0)


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
