"""The oracle with eyes on disk: a model that a server loads by mlx-vlm, and that tells which images it sees."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mlx_vlm.utils import load_processor
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import AddedToken

from tests.oracle import Kind, build_oracle, make_tokenizer
from tests.oracle.answers import image_name
from tests.oracle.site import sitecustomize
from tests.oracle.vision import seen_as
from tests.vision.checkpoint import SPECIAL, named_tokens, processor_settings

FAMILY = "qwen3_vl"
"""Whose processor it has."""
SITE = Path(sitecustomize.__file__).parent
"""To stand in `PYTHONPATH` of a server in another process."""


def build_vision_oracle(folder: Path, kind: Kind = "plain") -> Path:
    """Writes the checkpoint into `folder` (made if needed) and returns it."""
    build_oracle(folder, kind, template="seeing")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = json.loads((folder / "config.json").read_text())
    processor = processor_settings(FAMILY)
    config = {
        "model_type": sitecustomize.NAME.rpartition(".")[2],
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_config": {"spatial_merge_size": processor["merge_size"]},
        "text_config": {"model_type": "oracle_vl_text"},
        "max_position_embeddings": plain["max_position_embeddings"],
        "eos_token_id": plain["eos_token_id"],
        "oracle": {name: value for name, value in plain.items() if name != "model_file"}
        | {"model_type": "oracle", "vocab_size": tokenizer.get_vocab_size()},
    }
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | named_tokens(FAMILY)
    files = {
        "config.json": config,
        "tokenizer_config.json": settings,
        "preprocessor_config.json": processor,
        "processor_config.json": {"processor_class": processor["processor_class"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    weights = {"language_model.oracle.weight": np.zeros(8, np.float32)}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "mlx"})
    return folder


class Names:
    """What the oracle in a folder calls images."""

    def __init__(self, folder: Path) -> None:
        import_module(sitecustomize.NAME)  # it tells transformers of its processor
        self._processor: Any = load_processor(folder, False)

    def of(self, picture: Image.Image) -> str:
        made = self._processor(text=["<|image_pad|>"], images=[picture])
        (ids,) = made["input_ids"].tolist()
        length = ids.count(self._processor.image_token_id)
        return image_name(np.array(seen_as(np.array(made["pixel_values"]), length)))
