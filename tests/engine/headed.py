"""Tiny models with something that drafts for them, made in memory."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig, Qwen3_5MTPDraftModel

from start_llm.engine.decode.head import HeadedModel, SmallModel, language_of
from start_llm.engine.decode.upstream_heads import QwenHead
from start_llm.engine.vision import VisionModel
from tests.engine import vision_zoo
from tests.engine.zoo import CONFIGS, VOCAB, fresh
from tests.models.architectures import with_weights
from tests.oracle.build import build_oracle, make_tokenizer


def head_config() -> dict[str, Any]:
    text = {**copy.deepcopy(CONFIGS["qwen3_5"]["text_config"]), "mtp_num_hidden_layers": 1}
    return {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3}


def new_head(seed: int = 6) -> Any:
    return with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict(head_config())), seed)


@cache
def headed(name: str) -> HeadedModel:
    """Of random weights, with the MTP head of ``qwen3_5``.

    ``small``: a llama with another one that drafts. ``same``: a llama that drafts for itself.
    """
    if name in ("small", "same"):
        model = fresh("llama")
        return HeadedModel(model, SmallModel(fresh("llama", 5 if name == "same" else 6), VOCAB), model.model)
    model = fresh(name)
    language = getattr(model, "language_model", model)
    return HeadedModel(model, QwenHead(new_head(), language), language.model)


@cache
def headed_vision() -> HeadedModel:
    model = VisionModel(vision_zoo.make("qwen3_5"), vision_zoo.PAD)
    text = {**vision_zoo.config_of("qwen3_5")["text_config"], "mtp_num_hidden_layers": 1}
    module = with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), 6)
    return HeadedModel(model, QwenHead(module, language_of(model)), language_of(model).model)


def write_checkpoint(folder: Path, seed: int = 5, with_head: bool = True) -> Path:
    """A qwen3_5 with its head, as a checkpoint that mlx-lm loads, and the oracle's tokenizer."""
    build_oracle(folder)
    (folder / "oracle_model.py").unlink()
    size = make_tokenizer().get_vocab_size()
    text = {**head_config()["text_config"], "vocab_size": size}
    config = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = with_weights(model_class(args_class.from_dict(config)), seed)
    head = with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), seed + 1)
    weights = dict(tree_flatten(model.parameters()))
    weights |= {f"mtp.{name}": array for name, array in tree_flatten(head.parameters()) if with_head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
