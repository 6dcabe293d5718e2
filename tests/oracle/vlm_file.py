"""The oracle with eyes as a model of mlx-vlm (in the place of one of its own, see `site`): what `MODEL_PATH` may name.

Its embedding of a token is the token's id; its vision tower makes `vision.seen_as` of an image's pixels. So an image's
places hold in the KV what its pixels are, and the oracle tells by their names which images it sees (``{images}``).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.base import (
    BaseModelConfig,
    InputEmbeddingsFeatures,
    LanguageModelOutput,
    install_auto_processor_patch,
)
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.oracle.vision import seen_as

install_auto_processor_patch("llava_bunny", Qwen3VLProcessor)


@dataclass
class TextConfig(BaseModelConfig):
    model_type: str = "oracle_vl_text"


@dataclass
class VisionConfig(BaseModelConfig):
    spatial_merge_size: int = 2


@dataclass
class ModelConfig(BaseModelConfig):
    """`oracle`: the arguments of the oracle's own `ModelArgs`."""

    model_type: str
    image_token_id: int
    vision_start_token_id: int
    oracle: dict[str, Any]
    eos_token_id: int = 3
    model_path: str = ""
    text_config: Any = field(default_factory=TextConfig)
    vision_config: Any = field(default_factory=VisionConfig)


class Embedding(nn.Module):
    def embed_tokens(self, ids: mx.array) -> mx.array:
        return ids.astype(mx.float32)[..., None]


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        file = Path(config.model_path) / "oracle_model.py"
        spec = importlib.util.spec_from_file_location("oracle_model", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = Embedding()
        self.oracle = module.Model(module.ModelArgs.from_dict(config.oracle))

    @property
    def layers(self) -> Any:
        return self.oracle.layers

    def make_cache(self) -> list[Any]:
        return list(self.oracle.make_cache())

    def __call__(
        self, inputs: mx.array, inputs_embeds: mx.array | None = None, cache: Any = None, **_: Any
    ) -> LanguageModelOutput:
        tokens = inputs if inputs_embeds is None else inputs_embeds[..., 0].astype(mx.int32)
        return LanguageModelOutput(logits=self.oracle(tokens, cache=cache))


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = LanguageModel(config)

    def get_input_embeddings(self, input_ids: mx.array, pixel_values: mx.array, **_: Any) -> InputEmbeddingsFeatures:
        """Of one image: [1, tokens, 1]."""
        ids = np.array(input_ids)
        places = ids == self.config.image_token_id
        ids[places] = seen_as(np.array(pixel_values), int(places.sum()))
        return InputEmbeddingsFeatures(inputs_embeds=self.language_model.model.embed_tokens(mx.array(ids)))
