"""Tiny models, and LoRA adapters of them as mlx-lm writes them; sound ones, and ones with each fault."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import load as mlx_load
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import quantize_model, save

from tests.models.architectures import TEXT
from tests.oracle import build_oracle

LORA = {"rank": 4, "scale": 8.0, "dropout": 0.1}
LAYERS = 2


def build_base(folder: Path, width: int = 32, **changes: Any) -> Path:
    """A random llama with the oracle's tokenizer. `changes`: of its configuration."""
    build_oracle(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    more = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": LAYERS, "eos_token_id": 3}
    config = {"model_type": "llama", **TEXT, **more, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_unflatten([(name, 4 * array) for name, array in tree_flatten(model.parameters())]))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def build_adapter(folder: Path, base: Path, *, seed: int = 1, kind: str = "lora", layers: int = LAYERS) -> Path:
    """As `mlx_lm.lora` writes one; its weights are random."""
    folder.mkdir(parents=True)
    model: Any = mlx_load(str(base))[0]
    model.freeze()
    linear_to_lora_layers(model, layers, dict(LORA), use_dora=kind == "dora")
    mx.random.seed(seed)
    trained = {
        name: mx.random.normal(array.shape) * 0.3 if name.endswith("lora_b") else array
        for name, array in tree_flatten(model.trainable_parameters())
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)
    config = {"fine_tune_type": kind, "model": str(base), "num_layers": layers, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def quantise(into: Path, base: Path) -> Path:
    """What `mlx_lm.convert -q` writes."""
    model, tokenizer, config = mlx_load(str(base), return_config=True)  # type: ignore[misc]
    model, config = quantize_model(model, config, group_size=32, bits=8)
    save(into, str(base), model, tokenizer, config, donate_model=False)
    return into


def fuse(into: Path, base: Path, adapter: Path, *, dequantise: bool = False) -> Path:
    """What `mlx_lm.fuse` writes."""
    model, tokenizer, config = mlx_load(str(base), adapter_path=str(adapter), return_config=True)  # type: ignore[misc]
    fused = [(name, module.fuse(dequantise)) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    save(into, str(base), model, tokenizer, config, donate_model=False)
    return into


def change(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def weights(folder: Path, change: Any) -> None:
    path = folder / "adapters.safetensors"
    mx.save_safetensors(str(path), change(mx.load(str(path))))


def header(folder: Path, text: bytes) -> None:
    (folder / "adapters.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


FAULTS: list[tuple[str, Any, str]] = [
    ("no config", lambda f: (f / "adapter_config.json").unlink(), r"there is no adapter_config\.json in that folder"),
    ("broken config", lambda f: (f / "adapter_config.json").write_text("{"), r"cannot be read"),
    ("a list", lambda f: (f / "adapter_config.json").write_text("[]"), r"not a JSON object"),
    ("peft", lambda f: change(f, peft_type="LORA"), r"in the form of PEFT"),
    ("full", lambda f: change(f, fine_tune_type="full"), r"serve it as a model"),
    ("odd kind", lambda f: change(f, fine_tune_type="ia3"), r"must be lora or dora, but is 'ia3'"),
    ("layers", lambda f: change(f, num_layers="all"), r"num_layers must be a whole number, but is 'all'"),
    ("no parameters", lambda f: change(f, lora_parameters=None), r"has no lora_parameters"),
    ("rank 0", lambda f: change(f, lora_parameters=LORA | {"rank": 0}), r"rank must be 1 to 4096, but is 0"),
    ("other rank", lambda f: change(f, lora_parameters=LORA | {"rank": 7}), r"says rank 7, but model.* has the shape"),
    ("alpha", lambda f: change(f, lora_parameters={"rank": 4, "alpha": 16}), r"scale must be .* mlx-lm's is scale"),
    ("dropout", lambda f: change(f, lora_parameters=LORA | {"dropout": 1}), r"dropout must be from 0 to below 1"),
    ("keys", lambda f: change(f, lora_parameters=LORA | {"keys": [1]}), r"keys must be a list of names"),
    ("no weights", lambda f: (f / "adapters.safetensors").unlink(), r"there is no adapters\.safetensors"),
    ("not weights", lambda f: (f / "adapters.safetensors").write_bytes(b"x" * 99), r"no safetensors file"),
    ("no shape", lambda f: header(f, b'{"a": {"data_offsets": [0, 4]}}'), r"no safetensors file"),
    ("a shape of words", lambda f: header(f, b'{"a": {"shape": "x", "data_offsets": [0, 4]}}'), r"no safetensors file"),
    ("numbers", lambda f: weights(f, lambda w: {k: v.astype(mx.int8) for k, v in w.items()}), r"of the type I8; F32"),
    ("no number", lambda f: change(f, lora_parameters=LORA | {"scale": float("nan")}), r"must be a number, but is nan"),
    ("huge", lambda f: change(f, lora_parameters=LORA | {"scale": 10**400}), r"must be a number, but is 1000"),
    ("deep config", lambda f: (f / "adapter_config.json").write_text("[" * 100_000), r"cannot be read"),
    ("long config", lambda f: (f / "adapter_config.json").write_text(" " * 2**21), r"more than 1,048,576 bytes"),
    ("no offsets", lambda f: header(f, b'{"a": {"shape": [4], "data_offsets": [0, "x"]}}'), r"no safetensors file"),
    ("too deep", lambda f: header(f, b"[" * 100_000), r"no safetensors file"),
    ("cut", lambda f: cut(f / "adapters.safetensors"), r"cut short \([\d,]+ of [\d,]+ bytes\)"),
    ("strange", lambda f: weights(f, lambda w: w | {"model.layers.9.x.lora_a": mx.zeros((4, 4))}), r"1 of its weights"),
    ("missing", lambda f: weights(f, lambda w: dict(list(w.items())[2:])), r"not complete .* 2 weights are missing"),
]
