"""The weights of whisper-tiny.en as a checkpoint, from a package that holds them in CTranslate2's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import save_file

from tests.audio.tiny import write_settings

KINDS = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
NAMES = {
    "layer_norm": "ln_post",
    "self_attention/layer_norm": "attn_ln",
    "attention/layer_norm": "cross_attn_ln",
    "ffn/layer_norm": "mlp_ln",
    "ffn/linear_0": "mlp1",
    "ffn/linear_1": "mlp2",
    "attention/linear_0": "cross_attn.query",
    "attention/linear_2": "cross_attn.out",
    "self_attention/linear_1": "attn.out",
}


def convert(source: Path, folder: Path) -> Path:
    """`source`: the folder with ``model.bin`` and ``tokenizer.json``."""
    folder.mkdir(parents=True)
    weights: dict[str, Any] = {}
    for name, value in variables(source / "model.bin"):
        weights |= dict(_renamed(name, value))
    width, mels = weights["encoder.conv1.weight"].shape[0], weights["encoder.conv1.weight"].shape[2]
    texts, vocabulary = len(weights["decoder.positional_embedding"]), len(weights["decoder.token_embedding.weight"])
    layers = sum(name.endswith("cross_attn.query.weight") for name in weights)
    sizes = {"n_mels": mels, "n_audio_ctx": 1500, "n_vocab": vocabulary, "n_text_ctx": texts}
    for part in ("audio", "text"):
        sizes |= {f"n_{part}_state": width, f"n_{part}_head": width // 64, f"n_{part}_layer": layers}
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", **sizes}))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    vocab = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    write_settings(folder, mels)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def variables(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values: a version, a name, a revision, then each variable with its shape, kind and bytes."""
    with path.open("rb") as file:
        _number(file, "<I")
        _text(file)
        _number(file, "<I")
        for _ in range(_number(file, "<I")):
            name = _text(file)
            shape = [_number(file, "<I") for _ in range(_number(file, "<B"))]
            kind = KINDS[_number(file, "<B")]
            yield name, np.frombuffer(file.read(_number(file, "<I")), kind).reshape(shape)


def _renamed(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """As mlx-audio calls it; fused projections in their parts."""
    side, _, rest = name.partition("/")
    if rest == "embeddings/weight":
        yield "decoder.token_embedding.weight", value
    elif rest == "position_encodings/encodings" and side == "decoder":
        yield "decoder.positional_embedding", value
    elif rest.startswith("conv"):
        part, _, kind = rest.partition("/")
        yield f"{side}.{part}.{kind}", np.ascontiguousarray(value.transpose(0, 2, 1)) if kind == "weight" else value
    elif rest.startswith("layer_norm/"):
        yield f"{side}.{'ln_post' if side == 'encoder' else 'ln'}.{_kind(rest)}", value
    elif rest.startswith("layer_"):
        layer, _, part = rest.partition("/")
        begin, where = f"{side}.blocks.{layer.removeprefix('layer_')}", part.rpartition("/")[0]
        parts = {"self_attention/linear_0": "attn query key value", "attention/linear_1": "cross_attn key value"}
        if where in parts:
            room, *names = parts[where].split()
            for each, piece in zip(names, np.split(value, len(names)), strict=True):
                if (each, _kind(part)) != ("key", "bias"):  # Whisper has none
                    yield f"{begin}.{room}.{each}.{_kind(part)}", np.ascontiguousarray(piece)
        elif where in NAMES:
            yield f"{begin}.{NAMES[where]}.{_kind(part)}", value


def _kind(name: str) -> str:
    return {"gamma": "weight", "beta": "bias"}.get(name.rpartition("/")[2], name.rpartition("/")[2])


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<H")).rstrip(b"\0").decode()
