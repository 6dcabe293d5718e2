"""Tiny random models of every architecture whose caches differ, made in memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from mlx_lm.utils import _get_classes

from tests.models import architectures
from tests.models.architectures import TEXT, VOCAB, WINDOW

__all__ = ["CONFIGS", "NAMES", "QWEN35", "VOCAB", "WINDOW", "fresh", "make"]

_BASE = {**TEXT, "num_hidden_layers": 2}
QWEN35 = {
    **_BASE,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "model_type": "qwen3_5_text",
}
CONFIGS: dict[str, dict[str, Any]] = {"llama": _BASE, "qwen3_5": {"text_config": QWEN35, "vocab_size": VOCAB}}
"""Those that heads draft for: `lookups.safetensors` has weights of these shapes."""
NAMES = (
    *("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("gemma3_text", "gpt_oss", "glm4_moe_lite", "nemotron_h", "lfm2"),
)


def fresh(name: str, seed: int = 5) -> Any:
    """A model that nobody else has."""
    if name not in CONFIGS:
        return architectures.make(name)
    config = {"model_type": name, **copy.deepcopy(CONFIGS[name])}
    model_class, args_class = _get_classes(config)
    return architectures.with_weights(model_class(args_class.from_dict(config)), seed)


make = cache(fresh)
"""The same for every call."""
