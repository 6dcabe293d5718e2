"""What is wrong with a LoRA adapter, told before anything is loaded. Knows no MLX; reads only headers.

An adapter is a folder as `mlx_lm.lora` writes it: ``adapter_config.json`` and ``adapters.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import NotFound, NotSupported
from start_llm.models.checkpoint import safetensors_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
MOST_RANK = 4096
_FACTORS, _MAGNITUDE = frozenset({"lora_a", "lora_b"}), "m"


@dataclass(frozen=True)
class Adapter:
    """
    Attributes:
        name: the folder's.
        base: the model that it was trained on, as its maker wrote it; empty: not told.
        kind: ``lora``, or ``dora``: with a magnitude for each output.
        layers: how many of the model's last layers it changes; 0 or less: all.
        parameters: mlx-lm's ``lora_parameters``: rank, scale, dropout, and which modules (``keys``).
        shapes: of its weights, by name.
        digest: of all its bytes: KV that it makes is of no other adapter.
    """

    name: str
    folder: Path
    base: str
    kind: Literal["lora", "dora"]
    layers: int
    parameters: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    digest: str

    @property
    def rank(self) -> int:
        return int(self.parameters["rank"])

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def brings(self, name: str) -> bool:
        """Whether a parameter of this name is an adapter's own; ``m`` is one only where the kind has magnitudes."""
        last = name.rsplit(".", 1)[-1]
        return last in _FACTORS or (last == _MAGNITUDE and self.kind == "dora")


def read_adapter(source: str) -> Adapter:
    """Raises NotFound, NotSupported: with a sentence that says what is wrong and what to do."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise NotFound(f"ADAPTER_PATH={source}: there is no such folder.")
    config = _config(source, folder)
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise _wrong(
            source, "it has all weights of a model (fine_tune_type full) and is no adapter; serve it as a model"
        )
    if kind not in {"lora", "dora"}:
        raise _wrong(source, f"fine_tune_type must be lora or dora, but is {kind!r}")
    layers = config.get("num_layers")
    if type(layers) is not int:
        raise _wrong(source, f"num_layers must be a whole number, but is {layers!r}")
    parameters = _parameters(source, config.get("lora_parameters"))
    shapes = _shapes(source, folder / WEIGHTS)
    _check_rank(source, parameters["rank"], shapes)
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return Adapter(
        name=folder.resolve().name,
        folder=folder,
        base=str(config.get("model") or ""),
        kind=kind,
        layers=layers,
        parameters=parameters,
        shapes=shapes,
        digest=digest.hexdigest(),
    )


def other_base(adapter: Adapter, source: str) -> str | None:
    """A warning if the adapter names another model than the one that it is put on.

    Names prove nothing (a quantised copy has another one), so that this is no error: shapes are.
    """
    trained, served = (_plain(name) for name in (adapter.base, source))
    if not trained or not served or trained in served or served in trained:
        return None
    return f"{adapter.name} was trained on {adapter.base}, and {source} is served; answers are off if these differ"


def check_fits(adapter: Adapter, wanted: dict[str, tuple[int, ...]], source: str) -> None:
    """Raises NotSupported if the adapter's weights are not those that the model would have.

    Args:
        wanted: shapes of these, by name.
        source: the model's name, for errors.
    """
    trained = f" It was trained on {adapter.base}." if adapter.base else ""
    strange = sorted(adapter.shapes.keys() - wanted.keys())
    if strange:
        raise NotSupported(
            f"The adapter {adapter.name} does not fit {source}: {len(strange)} of its weights have no place there, "
            f"e.g. {strange[0]}.{trained}"
        )
    for name, shape in adapter.shapes.items():
        if shape != wanted[name]:
            raise NotSupported(
                f"The adapter {adapter.name} does not fit {source}: {name} has the shape {shape}, where {wanted[name]} "
                f"is needed.{trained}"
            )
    missing = sorted(wanted.keys() - adapter.shapes.keys())
    if missing:
        raise NotSupported(
            f"The adapter {adapter.name} is not complete for {source}: {len(missing)} weights are missing, e.g. "
            f"{missing[0]}.{trained}"
        )


def _plain(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _config(source: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        raise _wrong(source, f"there is no {CONFIG} in that folder; give the folder that mlx_lm.lora wrote") from None
    except (OSError, ValueError) as error:
        raise _wrong(source, f"its {CONFIG} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise _wrong(source, f"its {CONFIG} is not a JSON object")
    if "peft_type" in config:
        raise _wrong(source, "it is in the form of PEFT, not of mlx-lm; convert it, or train it with mlx_lm.lora")
    return config


def _parameters(source: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _wrong(source, f"{CONFIG} has no lora_parameters")
    rank, scale, dropout = found.get("rank"), found.get("scale"), found.get("dropout", 0.0)
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise _wrong(source, f"lora_parameters.rank must be 1 to {MOST_RANK}, but is {rank!r}")
    if type(scale) not in {int, float}:
        hint = "; alpha is another library's word, mlx-lm's is scale" if "alpha" in found else ""
        raise _wrong(source, f"lora_parameters.scale must be a number, but is {scale!r}{hint}")
    if type(dropout) not in {int, float} or not 0 <= dropout < 1:
        raise _wrong(source, f"lora_parameters.dropout must be from 0 to below 1, but is {dropout!r}")
    keys = found.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise _wrong(source, "lora_parameters.keys must be a list of names")
    return {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys}


def _shapes(source: str, path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        raise _wrong(source, f"there is no {WEIGHTS} beside its {CONFIG}")
    wanted, size = safetensors_bytes(path), path.stat().st_size
    if wanted is None:
        raise _wrong(source, f"{WEIGHTS} is no safetensors file")
    if size < wanted:
        raise _wrong(source, f"{WEIGHTS} is cut short ({size} of {wanted} bytes)")
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    try:
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (KeyError, TypeError, ValueError):
        raise _wrong(source, f"{WEIGHTS} is no safetensors file") from None
    if not shapes:
        raise _wrong(source, f"{WEIGHTS} has no weights")
    return shapes


def _check_rank(source: str, rank: int, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name.rsplit(".", 1)[-1] in _FACTORS and rank not in shape:
            raise _wrong(source, f"{CONFIG} says rank {rank}, but {name} has the shape {shape}")


def _wrong(source: str, what: str) -> NotSupported:
    return NotSupported(f"ADAPTER_PATH={source}: {what}.")
