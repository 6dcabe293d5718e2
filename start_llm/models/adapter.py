"""LoRA adapters: what is wrong with one, before it is loaded, and which of them requests may name.

An adapter is a folder as `mlx_lm.lora` writes it: ``adapter_config.json`` and ``adapters.safetensors``.
Knows no MLX; reads only headers. A name is a folder's plain name in START_LLM_CACHE_DIR/adapters, never a path, so that
no request reaches anything else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import BadRequest, NotFound, StartLLMError
from start_llm.core.limits import ADAPTER
from start_llm.models.checkpoint import read_json, whole_header

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
MOST_RANK = 4096
MOST_SCALE = 1e9
MOST_CONFIG = 2**20
MOST_READ = 1000
"""Adapters whose headers are kept, so that a look at the folder reads them once."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{ADAPTER.most - 1}}}")
_TYPES = frozenset({"F32", "F16", "BF16"})
_FACTORS, _MAGNITUDE = frozenset({"lora_a", "lora_b"}), "m"


@dataclass(frozen=True)
class Adapter:
    name: str  # the folder's
    folder: Path
    base: str  # the model that it was trained on, as its maker wrote it; empty: not told
    kind: Literal["lora", "dora"]  # ``dora``: with a magnitude for each output
    layers: int  # how many of the model's last layers it changes; 0 or less: all
    parameters: dict[str, Any]  # mlx-lm's ``lora_parameters``: rank, scale, dropout, and which modules (``keys``)
    shapes: dict[str, tuple[int, ...]]  # of its weights, by name
    digest: str = ""  # of all its bytes: KV that it makes is of no other adapter
    stamp: str = ""  # of its files, see `stamp_of`

    def brings(self, name: str) -> bool:
        """Whether a parameter of this name is an adapter's own; ``m`` is one only where the kind has magnitudes."""
        last = name.rsplit(".", 1)[-1]
        return last in _FACTORS or (last == _MAGNITUDE and self.kind == "dora")


def stamp_of(folder: Path) -> str:
    """Changes when the adapter's files do. Any value where they cannot be looked at."""
    with suppress(OSError):
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
        return " ".join(f"{each.st_dev} {each.st_ino} {each.st_size} {each.st_mtime_ns}" for each in found)
    return ""


def read_adapter(folder: Path, label: str) -> Adapter:
    """All of it but the weights themselves; all bytes are read once, for the digest. `label`: its name in errors.

    Raises NotFound: there is no such folder; BadRequest: a sentence that says what is wrong and what to do.
    """
    if not folder.is_dir():
        raise NotFound(f"{label}: there is no such folder.", param="adapter")
    stamp = stamp_of(folder)
    adapter = read_headers(folder, label)
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return replace(adapter, digest=digest.hexdigest(), stamp=stamp)


def read_headers(folder: Path, label: str) -> Adapter:
    """As `read_adapter`, but reads no weights, so that there is no digest. Raises BadRequest."""
    try:
        return _read_headers(folder)
    except ValueError as error:
        raise unusable(f"{label}: {error}.") from None


def _read_headers(folder: Path) -> Adapter:
    """Raises ValueError with what is wrong, as the end of a sentence; so do the functions that it calls."""
    config = _config(folder)
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise ValueError("it has all weights of a model (fine_tune_type full) and is no adapter; serve it as a model")
    if kind not in ("lora", "dora"):
        raise ValueError(f"fine_tune_type must be lora or dora, but is {kind!r:.40}")
    layers = config.get("num_layers")
    if type(layers) is not int:
        raise ValueError(f"num_layers must be a whole number, but is {layers!r:.40}")
    parameters = _parameters(config.get("lora_parameters"))
    shapes = _shapes(folder / WEIGHTS)
    for name, shape in shapes.items():
        if name.rsplit(".", 1)[-1] in _FACTORS and parameters["rank"] not in shape:
            raise ValueError(f"{CONFIG} says rank {parameters['rank']}, but {name} has the shape {shape}")
    return Adapter(folder.resolve().name, folder, str(config.get("model") or ""), kind, layers, parameters, shapes)


def other_base(base: str, source: str) -> str | None:
    """The model that an adapter was trained on, if it is called differently from the one that it is put on.

    Names prove nothing (a quantised copy has another one, that contains the base's); shapes do.
    """
    trained, served = _plain(base), _plain(source)
    if not trained or not served or trained in served or served in trained:
        return None
    return base


def check_fits(adapter: Adapter, wanted: dict[str, tuple[int, ...]], source: str) -> None:
    """Raises BadRequest if the adapter's weights are not those of `wanted`, which the model `source` would have."""
    trained = f" It was trained on {public_name(adapter.base)}." if adapter.base else ""
    strange, missing = sorted(adapter.shapes.keys() - wanted.keys()), sorted(wanted.keys() - adapter.shapes.keys())
    other = [name for name, shape in adapter.shapes.items() if shape != wanted.get(name)]
    if strange:
        what = f"does not fit {source}: {len(strange)} of its weights have no place there, e.g. {strange[0]}"
    elif other:
        shapes = f"the shape {adapter.shapes[other[0]]}, where {wanted[other[0]]} is needed"
        what = f"does not fit {source}: {other[0]} has {shapes}"
    elif missing:
        what = f"is not complete for {source}: {len(missing)} weights are missing, e.g. {missing[0]}"
    else:
        return
    raise unusable(f"The adapter {adapter.name} {what}.{trained}")


def public_name(base: str) -> str:
    """A model's name as clients may see it: of a folder on this disk its name only."""
    return base.rstrip("/").rsplit("/", 1)[-1][:200] if base.startswith(("/", "~", ".")) else base[:200]


def _plain(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"there is no {CONFIG} in that folder; give the folder that mlx_lm.lora wrote")
    try:
        config = read_json(path, MOST_CONFIG)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"its {CONFIG} cannot be read ({why})") from None
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} is not a JSON object")
    if "peft_type" in config:
        raise ValueError("it is in the form of PEFT, not of mlx-lm; convert it, or train it with mlx_lm.lora")
    return config


def _parameters(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} has no lora_parameters")
    rank, scale, dropout = found.get("rank"), found.get("scale"), found.get("dropout", 0.0)
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ValueError(f"lora_parameters.rank must be 1 to {MOST_RANK}, but is {rank!r:.40}")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not abs(scale) < MOST_SCALE:
        hint = "; alpha is another library's word, mlx-lm's is scale" if "alpha" in found else ""
        raise ValueError(f"lora_parameters.scale must be a number, but is {scale!r:.40}{hint}")
    if type(dropout) not in {int, float} or not 0 <= dropout < 1:
        raise ValueError(f"lora_parameters.dropout must be from 0 to below 1, but is {dropout!r:.40}")
    keys = found.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ValueError("lora_parameters.keys must be a list of names")
    return {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        raise ValueError(f"there is no {WEIGHTS} beside its {CONFIG}")
    header = whole_header(path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    types = {tensor.dtype for tensor in header.tensors.values()}
    if not shapes:
        raise ValueError(f"{WEIGHTS} has no weights")
    if types - _TYPES:
        raise ValueError(f"{WEIGHTS} has weights of the type {min(types - _TYPES)[:40]}; F32, F16 and BF16 are known")
    return shapes


def unusable(sentence: str) -> BadRequest:
    return BadRequest(sentence, param="adapter", code="adapter_not_usable")


# --- the folder of adapters ----------------------------------------------------------------


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter that lies in the folder."""

    name: str
    folder: Path
    base: str  # the model that it was trained on, as its maker wrote it; empty: not told
    size: int  # bytes of its weights
    stamp: str  # changes when its files do
    problem: str = ""  # why it cannot be used, in a sentence; empty if nothing shows without its weights
    links: tuple[str, ...] = field(default=(), compare=False)  # its other names: links that lead to the same files

    def read(self) -> Adapter:
        """Raises NotFound, BadRequest."""
        return replace(read_adapter(self.folder, _label(self.name)), name=self.name)

    def fits(self, *names: str) -> bool:
        """Whether it was trained on a model that is called like one of these, or does not say on which."""
        return any(other_base(self.base, name) is None for name in names)


def check_name(name: str, param: str) -> str:
    """The same name. Raises BadRequest unless it is a plain one. `param`: the field of the request."""
    if not _NAME.fullmatch(name):
        allowed = f"up to {ADAPTER.most} letters, digits, '.', '_', '-', of which the first is a letter or a digit"
        what = f"{param}: {name[:60]!r} is no adapter's name; give {allowed}."
        raise BadRequest(what, param=param, code="invalid_value")
    return name


class AdapterFolder:
    """What lies in the folder now. Any thread; a look costs two file headers where files have changed, else nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> StoredAdapter | None:
        """The adapter of that plain name. By a link's name it is the one that the link leads to."""
        if not _NAME.fullmatch(name):
            return None
        names = self._names_of(name)
        if not names:
            return None
        name, *links = names
        folder = self._folder / name
        return replace(_stored(name, folder, stamp_of(folder)), links=tuple(links)) if folder.is_dir() else None

    def all(self) -> tuple[StoredAdapter, ...]:
        """By name, each once. A folder without a configuration is none."""
        try:
            names = sorted(path.name for path in self._folder.iterdir() if (path / CONFIG).exists())
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("the adapters cannot be listed now: %s", error)
            return ()
        found = {each.name: each for name in names if (each := self.find(name)) is not None}
        return tuple(found.values())

    def _names_of(self, name: str) -> list[str]:
        """All names of the same adapter: its folder's own first, then those of links, by name. Empty: there is none.

        A disk that takes ``Titles`` for ``titles`` would else have one adapter be as many models as it has spellings.
        """
        target = os.path.realpath(self._folder / name)
        try:
            with os.scandir(self._folder) as entries:
                there = {each.name: each.is_symlink() for each in entries}
        except OSError:
            return [name]
        if name not in there:
            return []
        links = sorted(each for each, is_link in there.items() if is_link and _NAME.fullmatch(each))
        links = [link for link in links if os.path.realpath(self._folder / link) == target]
        place, own = os.path.split(target)
        if place == os.path.realpath(self._folder) and _NAME.fullmatch(own):
            return [own, *links]
        return links or [name]


@lru_cache(MOST_READ)
def _stored(name: str, folder: Path, stamp: str) -> StoredAdapter:
    try:
        adapter = read_headers(folder, _label(name))
        return StoredAdapter(name, folder, adapter.base, (folder / WEIGHTS).stat().st_size, stamp)
    except StartLLMError as error:
        return StoredAdapter(name, folder, "", 0, stamp, error.message)
    except OSError as error:
        return StoredAdapter(name, folder, "", 0, stamp, f"{_label(name)} cannot be read ({error.strerror}).")


def _label(name: str) -> str:
    return f"The adapter {name!r}"
