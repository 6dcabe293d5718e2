"""Folders and ports that are wrong in one way each, for the table of wrong inputs."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

CONFIG = {"model_type": "llama", "hidden_size": 8}


def safetensors(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def checkpoint(folder: Path, **config: object) -> Path:
    """A folder that looks like a whole model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    safetensors(folder / "model.safetensors")
    return folder


def make_places(root: Path) -> None:
    """The folders that the table names, in `root`."""
    checkpoint(root / "whole")
    (root / "file.txt").write_text("x")
    (root / "m.gguf").write_bytes(b"GGUF")
    (root / "ggufs").mkdir()
    (root / "ggufs" / "m.gguf").write_bytes(b"GGUF")
    (root / "empty").mkdir()
    torch = checkpoint(root / "torch")
    (torch / "model.safetensors").unlink()
    (torch / "pytorch_model.bin").write_bytes(b"x")
    cut = checkpoint(root / "cut")
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - 1)
    (checkpoint(root / "noweights") / "model.safetensors").unlink()
    (checkpoint(root / "noise") / "model.safetensors").write_bytes(b"no header at all")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (checkpoint(root / "shards") / "model.safetensors.index.json").write_text(json.dumps(index))
    index = {"weight_map": {"w": "\x1b[2Jgone.safetensors"}}
    (checkpoint(root / "escapes") / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint(root / "unknown", model_type="quasar9")
    checkpoint(root / "code", model_file="model.py\x1b[2J")
    (checkpoint(root / "badjson") / "config.json").write_text("{")
    (checkpoint(root / "notype") / "config.json").write_text("{}")
    (checkpoint(root / "notokens") / "tokenizer.json").unlink()
    (root / "rules.toml").write_text("[[client]]\nname = 3\n")
