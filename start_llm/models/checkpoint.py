"""Says what is wrong with a checkpoint before anything of it is built. Knows no MLX; reads JSON files and headers only.

Nothing in a folder is trusted: JSON may be nested or long without end, a number of layers may be anything, a header
may tell of tensors that the file does not hold.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import Explained
from start_llm.core.extras import is_installed, missing
from start_llm.core.media import AudioTask
from start_llm.core.paths import expanded

INDEX = "model.safetensors.index.json"
DEFAULT_CONTEXT = 32768
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PYTORCH = ("pytorch_model*.bin", "*.pth", "*.pt", "consolidated*.safetensors")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OLLAMA = re.compile(r"(?:[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]*:[\w.-]+")
_MOST_HEADER_BYTES = 100 << 20  # what the safetensors library allows
MOST_JSON_BYTES = 16 << 20  # of a configuration; an index of a thousand experts has 10 MB
SETTINGS: dict[AudioTask, str] = {"transcription": "TRANSCRIPTION_MODEL", "speech": "SPEECH_MODEL"}
"""Which setting names the model of a task."""
_TASKS: dict[str, AudioTask] = {"whisper": "transcription", "soprano": "speech"}
"""Architectures of audio models that are served."""
_COUNT = re.compile(r"(^|_)(n_layer|layers?|depths?|blocks?|experts|heads|groups|loops)$")
"""Names in a config of how many objects of a kind are made."""
_LEAST_COUNT = 1024  # so many are always allowed: they take no time
_TENSOR_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
_GIVE = "give the folder of an MLX model, or owner/name to download one."

Library = Literal["mlx-lm", "mlx-vlm"]
TEXT_OF_MLX_VLM = {
    *("cohere2_moe", "cohere2moe", "deepseek_v4", "flint", "glm5_next", "hrm_text", "hy_v4", "inkling"),
    *("inkling_mm_model", "k2_horizon", "kolibri1", "limite", "longcat_flash_sparse", "mimo_v2", "minimax_m3"),
    *("mistral_large3", "muse_spark_open", "nemotron_h_puzzle", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp"),
    *("step3p7", "xing4_0"),
}
"""Every ``model_type`` of a text model that mlx-vlm has and mlx-lm has not. See `library_of`."""
NGRAMS = ".ple.ple_embedding.ngram_embedding."
"""Stands in the names of tensors that mlx-vlm does not load where ``ple_storage`` says that they stay on the disk."""

LIBRARY_ERRORS = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ArithmeticError),
    *(OSError, RuntimeError, ImportError, MemoryError),
)
"""What libraries raise of a checkpoint that they cannot load."""
UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError
"""What is raised of JSON that is not there, or holds something else than it should."""


class CheckpointError(Explained, ValueError):
    """This cannot be served. The message is one sentence that says why and what to do."""


def _wrong(source: str, what: str) -> CheckpointError:
    return CheckpointError(f"MODEL_PATH={source}: {what}")


def read_json(path: Path, most: int = MOST_JSON_BYTES) -> Any:
    """Raises OSError; ValueError for what is no JSON, is nested too deeply or has more than `most` bytes."""
    with path.open("rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    data = read_json(folder / "config.json")
    if not isinstance(data, dict):
        raise ValueError(f"{folder / 'config.json'} is not a JSON object")
    return data


def readable_config(folder: Path) -> dict[str, Any]:
    """`read_config`; empty where there is none, or none that can be read."""
    try:
        return read_config(folder)
    except (OSError, ValueError):
        return {}


def context_length(config: Mapping[str, Any]) -> int:
    """The model's own limit; multimodal configs keep it in ``text_config``."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


def is_path(source: str) -> bool:
    """Whether MODEL_PATH can only mean a place on this disk."""
    return source.startswith(("/", "~", "./", "../")) or source in {".", ".."} or os.path.exists(expanded(source))


def check_source(source: str, *, command: str, trust_code: bool = False, known: Iterable[str] = ()) -> None:
    """Raises CheckpointError if MODEL_PATH, a folder or a repository's name, cannot be a model for this server.

    The message has the next command, which begins with `command`, and a name of `known` that may have been meant.
    `trust_code`: Python code that the checkpoint brings may run.
    """
    if is_path(source):
        _check_place(source, expanded(source), command, trust_code)
    elif source.lower().endswith(".gguf") or re.search(r"[-_.]gguf$", source, re.IGNORECASE):
        raise _wrong(source, _gguf(command))
    elif _OLLAMA.fullmatch(source):
        what = f"MODEL_PATH={source} is a name of Ollama, whose files MLX cannot read"
        raise CheckpointError(f"{what}: `{command} recommend` names some for this machine.")
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
        raise _wrong(source, f"{odd.name} is no file; fetch it again.")


def _check_place(source: str, folder: Path, command: str, trust_code: bool) -> None:
    if not folder.exists():
        raise _wrong(source, f"there is no such folder; {_GIVE}")
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            raise _wrong(source, _gguf(command))
        raise CheckpointError(f"MODEL_PATH={source} is a file; give the folder that holds it: {folder.parent}.")
    check_files(source, folder)
    _check_weights_kind(source, folder, command)
    config = _config(source, folder)
    code = config.get("model_file")
    if code and not trust_code:
        raise CheckpointError(
            f"The checkpoint {source} brings its own Python code ({code!r:.80}); set TRUST_REMOTE_CODE=true to run "
            "it, if you trust where it comes from."
        )
    if not code:
        _check_architecture(source, config)
    headers = _check_whole(source, folder)
    if not code:
        _check_counts(source, config, headers)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        what = "there is no tokenizer (tokenizer.json) beside the weights; fetch the whole model again"
        raise _wrong(source, f"{what}, or give owner/name to download it.")


def _check_weights_kind(source: str, folder: Path, command: str) -> None:
    if any(folder.glob("model*.safetensors")) or (folder / INDEX).exists():
        return
    if any(folder.glob("*.gguf")):
        raise _wrong(source, _gguf(command))
    if any(path for pattern in _PYTORCH for path in folder.glob(pattern)):
        convert = f"mlx_lm.convert --hf-path {source} --mlx-path {source.rstrip('/')}-mlx -q"
        raise CheckpointError(f"MODEL_PATH={source} holds weights of PyTorch only; convert them: `{convert}`.")
    if not (folder / "config.json").exists():
        raise _wrong(source, f"there is no config.json in that folder; {_GIVE}")
    raise CheckpointError(f"MODEL_PATH={source} has no weights (model*.safetensors); give owner/name to download them.")


def _gguf(command: str) -> str:
    return (
        "GGUF files are for llama.cpp, and MLX cannot serve them; take the same model in MLX's format "
        f"(mlx-community/...), or one that `{command} recommend` names."
    )


def _config(source: str, folder: Path) -> dict[str, Any]:
    try:
        data = read_json(folder / "config.json")
    except FileNotFoundError:
        raise _wrong(source, "there is no config.json in that folder.") from None
    except (OSError, ValueError) as error:
        raise _wrong(source, f"its config.json cannot be read ({error}); fetch it again.") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise _wrong(source, "its config.json names no model_type, so nobody can load it.")
    return data


# --- architectures --------------------------------------------------------------------------


def _check_architecture(source: str, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    task = task_of(config)
    if task is not None:
        what = f"MODEL_PATH={source} is an audio model ({kind}), which writes no answers"
        raise CheckpointError(f"{what}; serve it beside one that does: {SETTINGS[task]}={source}.")
    check_library(f"MODEL_PATH={source}: ", config)


def check_library(what: str, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError, which begins with `what`, where no library knows the ``model_type``."""
    if not architectures() or library_of(config) is not None:
        return
    kind = config.get("model_type")
    if not is_installed("mlx_vlm") and (kind in TEXT_OF_MLX_VLM or isinstance(config.get("vision_config"), dict)):
        raise CheckpointError(f"{what}mlx-lm has no text model of its type {kind!r}. mlx-vlm may: {missing('mlx_vlm')}")
    tried = f"neither mlx-lm nor mlx-vlm has a text model of its type {kind!r}"
    raise CheckpointError(f"{what}{tried}; choose another model, or update them once they have it.")


def library_of(config: Mapping[str, Any]) -> Library | None:
    """What reads the text model of a checkpoint: mlx-lm if it has the type or the checkpoint brings its own code,
    else the language model alone of mlx-vlm's."""
    kind = str(config.get("model_type"))
    if config.get("model_file") or kind in architectures():
        return "mlx-lm"
    sees = isinstance(config.get("vision_config"), dict)
    known = architectures("mlx_vlm")
    return "mlx-vlm" if kind in known and (sees or kind in TEXT_OF_MLX_VLM) else None


@cache
def architectures(library: str = "mlx_lm") -> frozenset[str]:
    """Every ``model_type`` that the installed mlx-lm (or mlx-vlm) can load, found without importing it; empty if it is
    not there."""
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(found.submodule_search_locations)))
    files = frozenset(path.stem for path in folder.glob("models/*.py"))
    packages = frozenset(path.parent.name for path in folder.glob("models/*/__init__.py"))
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


def _check_whole(source: str, folder: Path) -> list[SafetensorsHeader]:
    """The headers of all weight files."""
    there, named = sorted(folder.glob("model*.safetensors")), set[str]()
    with suppress(*UNREADABLE):  # many have no index
        named = {str(name) for name in read_json(folder / INDEX)["weight_map"].values()}
    if missing := sorted(named - {path.name for path in there}):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"MODEL_PATH={source} is not complete: {missing[0]}{more} is missing; fetch it again.")
    try:
        return [whole_header(path) for path in there]
    except ValueError as error:
        raise _wrong(source, f"{error}; fetch it again.") from None


def _check_counts(source: str, config: dict[str, Any], headers: Iterable[SafetensorsHeader]) -> None:
    """No more layers, experts or heads than the weights can be of: each would become an object."""
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    widest = max((size for tensor in tensors for size in tensor.shape), default=0)
    most = max(_LEAST_COUNT, 4 * len(tensors), 4 * widest)
    for name, value in _numbers(config):
        if _COUNT.search(name) and value > most:
            said = f"its config.json says {name}={value:.6g}"
            there = f"its weights are {len(tensors)} tensors of at most {widest} rows"
            raise _wrong(source, f"{said}, but {there}; fetch it again.")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(key, number) of a config and of the parts in it."""
    parts: list[Mapping[str, Any]] = [config]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, int | float):
                    yield name, number


def weights_on_disk(folder: Path) -> int:
    """Bytes that a checkpoint's weights take in memory: what its index says, else its files. 0 if it has neither."""
    files = sorted(folder.glob("model*.safetensors"))
    if files and maps_ngrams(readable_config(folder)):
        headers = [header for path in files if (header := safetensors_header(path)) is not None]
        tensors = [pair for header in headers for pair in header.tensors.items()]
        return sum(tensor.end - tensor.begin for name, tensor in tensors if NGRAMS not in name)
    try:
        told = read_json(folder / INDEX)["metadata"]
        return int(told["total_size"]) - int(told.get("external_ple_bytes", 0))
    except UNREADABLE:  # many have no index, or one without it
        return sum(path.stat().st_size for path in files)


def parameters_on_disk(folder: Path) -> int:
    """How many parameters the weight files hold: of quantised ones, 32-bit words are unpacked, scales do not count."""
    bits = readable_config(folder).get("quantization")
    packed = bits.get("bits") if isinstance(bits, dict) else None
    each = 32 // packed if isinstance(packed, int) and 0 < packed <= 32 else 1
    headers = (safetensors_header(path) for path in folder.glob("model*.safetensors"))
    tensors = [pair for header in headers if header is not None for pair in header.tensors.items()]
    return sum(
        math.prod(tensor.shape) * (each if tensor.dtype == "U32" else 1)
        for name, tensor in tensors
        if each == 1 or not name.endswith((".scales", ".biases"))
    )


def maps_ngrams(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's n-gram table stays on the disk and is read there, row by row (Qwen3.8-Flash-Next)."""
    text = config.get("text_config")
    return isinstance(text, dict) and bool(text.get("ple_storage"))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`begin`, `end`: bytes behind the file's header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Of a safetensors file. `length`: bytes before the first tensor's."""

    length: int
    tensors: Mapping[str, StoredTensor]


def safetensors_header(path: Path) -> SafetensorsHeader | None:
    """``None`` if the file has none, or one that contradicts itself."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > _MOST_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        tensors = {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
    except (*UNREADABLE, RecursionError, struct.error):
        return None
    return SafetensorsHeader(8 + int(length), tensors)


def whole_header(path: Path) -> SafetensorsHeader:
    """Raises ValueError, which names the file: it has no header, or fewer bytes than that says."""
    header, size = safetensors_header(path), path.stat().st_size
    if header is None:
        raise ValueError(f"{path.name} is no safetensors file")
    whole = header.length + max((tensor.end for tensor in header.tensors.values()), default=0)
    if size < whole:
        raise ValueError(f"{path.name} is cut short ({size:,} of {whole:,} bytes)")
    return header


def _tensor(entry: Mapping[str, Any]) -> StoredTensor:
    """Raises ValueError, KeyError, TypeError."""
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not all(type(number) is int and 0 <= number < 2**63 for number in (begin, end, *shape)):
        raise ValueError("a size is no number")
    bits = _TENSOR_BITS.get(dtype)
    if begin > end or (bits is not None and math.prod(shape) * bits != 8 * (end - begin)):
        raise ValueError("a tensor's bytes do not fit its shape")
    return StoredTensor(str(dtype), shape, begin, end)


# --- audio ----------------------------------------------------------------------------------


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
    try:
        for path in weights:
            whole_header(path)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}; fetch it again.") from None
    if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
        raise CheckpointError(f"{source}: has no tokenizer (tokenizer.json) beside its weights.")
