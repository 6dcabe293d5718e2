"""Tiny random vision models of the families that are served, made in memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from mlx_vlm.utils import get_model_and_args, update_module_configs

from tests.engine.zoo import QWEN35
from tests.models.architectures import TEXT, with_weights

VOCAB = 256
PAD, VIDEO, OPENS, CLOSES = 250, 251, 252, 253
WIDTH = 32

_TEXT: dict[str, Any] = {**TEXT, "vocab_size": VOCAB}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
_IDS = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": OPENS, "vision_end_token_id": CLOSES}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**QWEN35, **_TEXT, "full_attention_interval": 4, "head_dim": 32},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
        **_IDS,
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0]},
        **_IDS,
    },
    "qwen2_5_vl": {
        **{name: value for name, value in _TEXT.items() if name != "head_dim"},
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": {
            **_QWEN_VISION,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "model_type": "qwen2_5_vl",
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        **_IDS,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "sliding_window": 64,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 10000.0,
            "mm_tokens_per_image": 16,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 112,
            "num_channels": 3,
        },
        "image_token_index": PAD,
        "image_token_id": PAD,
        "hidden_size": WIDTH,
        "pad_token_id": 0,
    },
}


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, "vocab_size": VOCAB, **copy.deepcopy(CONFIGS[name])}


@cache
def make(name: str) -> Any:
    """Float32, with weights that make the greedy text varied; the same for every call."""
    config = config_of(name)
    module, _ = get_model_and_args(config)
    config.setdefault("text_config", {})
    made = update_module_configs(module.ModelConfig.from_dict(config), module, config, ["text", "vision"])
    return with_weights(module.Model(made), 7)
