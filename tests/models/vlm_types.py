"""Tiny random text models of types that only mlx-vlm has, in memory and as checkpoints on disk."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import get_model_and_args, save_weights, update_module_configs

from start_llm.models.vision import mend_mlx_vlm
from tests.models.architectures import VOCAB, _fields, with_weights
from tests.oracle import build_oracle, make_tokenizer

_MIXED = ["sliding_attention", "full_attention"] * 2
_VISION = {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "num_heads": 2, "depth": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"layer_types": _MIXED},
    "deepseek_v4": {
        "compress_ratios": [0, 4, 128, 0],
        "qk_rope_head_dim": 16,
        "head_dim": 32,
        "index_head_dim": 32,
        "index_topk": 8,
        "index_n_heads": 16,
        "num_hash_layers": 1,
        "index_block": 0,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "flint": {},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 2,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "index_kpool": 4,
            "index_topk": 16,
            "index_n_heads": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "hc_mult": 2,
        },
        "vision_config": {**_VISION, "image_size": 28},
    },
    "hrm_text": {"num_key_value_heads": 2},
    "hy_v4": {"index_n_heads": 16},
    "inkling": {"vision_config": {}, "audio_config": {}},
    "k2_horizon": {},
    "kolibri1": {"layer_types": _MIXED},
    "limite": {"ve_layers": [1], "ve_stored_heads": 1, "head_dim": 128, "hidden_size": 256},
    "longcat_flash_sparse": {"index_n_heads": 16},
    "minimax_m3": {
        "rotary_dim": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": 1,
            "sparse_index_dim": 16,
            "sparse_block_size": 8,
            "sparse_topk_blocks": 2,
            "sparse_attention_freq": [0, 0, 1, 1],
        },
    },
    "mistral_large3": {},
    "qwen3_5_text": {
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        }
    },
    "qwen4_exp": {
        "text_config": {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "hc_count": 2,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_head_dim": 32,
            "indexer_budget": 8,
            "indexer_kv_heads": 1,
            "indexer_compress_ratio": 4,
            "full_attention_interval": 4,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {**_VISION, "deepstack_visual_indexes": []},
    },
    "step3p7": {
        "text_config": {"num_attention_groups": 1, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32},
        "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 28},
    },
    "xing4_0": {},
}


def config_of(name: str, vocabulary: int = VOCAB) -> dict[str, Any]:
    module, _ = get_model_and_args({"model_type": name})
    config = {**_fields(module.ModelConfig), "model_type": name}
    text = getattr(module, "TextConfig", None)
    if text is not None and "text_config" in {field.name for field in dataclasses.fields(module.ModelConfig)}:
        config["text_config"] = {**_fields(text), "model_type": name}
    for key, value in copy.deepcopy(CONFIGS[name]).items():
        config[key] = {**(config.get(key) or {}), **value} if isinstance(value, dict) else value
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = vocabulary
    return {key: value for key, value in config.items() if value is not ...}


def make(name: str, vocabulary: int = VOCAB) -> Any:
    """mlx-vlm's whole model, mended, in float32, with weights that make the greedy text varied."""
    mend_mlx_vlm()
    config = config_of(name, vocabulary)
    module, _ = get_model_and_args(config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    made = module.ModelConfig.from_dict(copy.deepcopy(config))
    return with_weights(module.Model(update_module_configs(made, module, config, ["text", "vision", "audio"])))


def save(folder: Path, name: str, **more: Any) -> Path:
    """Writes a checkpoint with the oracle's tokenizer into `folder` (made if needed) and returns it."""
    build_oracle(folder)
    size = make_tokenizer().get_vocab_size()
    (folder / "config.json").write_text(json.dumps({**config_of(name, size), "eos_token_id": 3, **more}))
    save_weights(folder, make(name, size))
    return folder


def truth(language: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by a plain loop over mlx-vlm's language model, with its own cache: the prompt in one pass."""
    cache, tokens, at, found = make_prompt_cache(language), list(prompt), 0, list[int]()
    for _ in range(count):
        positions = mx.broadcast_to(mx.arange(at, at + len(tokens)), (3, 1, len(tokens)))
        more = (
            {"position_ids": positions}
            if hasattr(language.model, "rotary_emb") or "qwen" in str(type(language))
            else {}
        )
        logits = language(mx.array([tokens]), cache=cache, **more).logits
        at, tokens = at + len(tokens), [int(mx.argmax(logits[0, -1]).item())]
        found += tokens
    return found
