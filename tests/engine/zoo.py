"""Tiny random models of every architecture whose caches differ, made in memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

VOCAB = 64
WINDOW = 16

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_QWEN35 = {
    **_BASE,
    **_LINEAR,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen3": _BASE,
    "qwen3_moe": {
        **_BASE,
        **_EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **_BASE,
        **_LINEAR,
        **_EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5": {"text_config": {**_QWEN35, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {"text_config": {**_QWEN35, **_EXPERTS, "model_type": "qwen3_5_moe_text"}},
    "gemma3_text": {
        **_BASE,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
    },
    "gpt_oss": {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "glm4_moe_lite": {
        **_BASE,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        **_BASE,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": list("M-M*"),
    },
    "lfm2": {
        **_BASE,
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}


@cache
def make(name: str) -> Any:
    """Float32, with weights that make the greedy text varied; the same for every call."""
    config = {"model_type": name, **copy.deepcopy(CONFIGS[name])}
    config.setdefault("vocab_size", VOCAB)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.random.seed(5)
    model.update(tree_unflatten([(name, _weights(name, old)) for name, old in tree_flatten(model.parameters())]))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weights(name: str, old: mx.array) -> Any:
    if old.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return old
    if "embed" in name:
        return mx.random.normal(old.shape)
    if "conv" in name and old.ndim == 3:
        return mx.random.normal(old.shape) * 0.5
    if old.ndim >= 2:
        return mx.random.normal(old.shape) * (1.5 / old.shape[-1] ** 0.5)
    if "norm" in name or "bias" in name:
        return old.astype(mx.float32) + mx.random.normal(old.shape) * 0.05
    return old.astype(mx.float32)
