"""Tiny random models of the architectures of mlx-lm: configurations made from the fields that each one declares.

A field that is known by name gets a small value; another one that has no default gets a value of its type. What an
architecture wants beyond that stands in `SPECIAL`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from tests.models.metal import import_muse_spark

VOCAB = 64
WINDOW = 16

_NO_MODELS = {"mla", "pipeline", "switch_layers", "rope_utils", "bitlinear_layers", "gated_delta", "ssm"}
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "block_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads", "num_query_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 1),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "dense_intermediate_size", "block_ff_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "ff_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "v_head_dim", "index_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_ctx", "n_positions", "block_size", "model_max_length"), 4096),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rope_local_base_freq", "rotary_emb_base"), 10000.0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "a_low_rank_dim", "v_low_rank_dim"), 16),
    **dict.fromkeys(("gate_low_rank_dim", "decay_low_rank_dim", "time_step_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "decoder_sparse_step", "moe_layer_freq"), 1),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv_kernel_size", "mamba_d_conv", "conv1d_width"), 4),
    "index_n_heads": 2,
    "index_topk": 16,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_scaling": None,
    "torch_dtype": "float32",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
_MIXED = [_SLIDING, _FULL, _SLIDING, _FULL]
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale_all_dim": 1.0}
_LLAMA4 = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 2048}
_TEXT_CLASSES = {
    "gemma3n": ("gemma3n", "TextConfig"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
"""Where the fields of a ``text_config`` are declared that has more of them than others."""
_LFM2 = {"layer_types": ["conv", _FULL, "conv", _FULL], "conv_L_cache": 3, "block_ffn_dim_multiplier": 1.0}
_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"}
SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1, "hidden_dim_scale_factor": 2.0},
    "afmoe": {"layer_types": _MIXED},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [0, 2]},
    "bailing_hybrid": {"layer_group_size": 2},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v41": {
        "head_dim": 32,
        "index_head_dim": 32,
        "index_topk": 8,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", _SLIDING, "conv_mixer", _FULL]},
    "gemma3": {"text_config": {"model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 2}},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma4": {"text_config": {"model_type": "gemma4_text", "num_kv_shared_layers": 0, "layer_types": _MIXED}},
    "gemma4_text": {"num_kv_shared_layers": 0, "layer_types": _MIXED},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0}},
    "granitemoehybrid": {  # without these it has no layer at all
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_heads": 2,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0}, "cla_share_factor": 1},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"linear_attn_config": _KDA, "head_dim": 32},
    "kimi_k3": {
        "text_config": {
            **dict.fromkeys(("num_experts", "num_hidden_layers"), 4),
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts_per_token"), 2),
            **dict.fromkeys(("hidden_size", "moe_intermediate_size"), 32),
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
            "vocab_size": VOCAB,
            "intermediate_size": 64,
            "qk_rope_head_dim": 8,
            "first_k_dense_replace": 1,
            "attn_res_block_size": 2,
            "linear_attn_config": _KDA,
        }
    },
    "gemma3n": {
        "text_config": {
            "layer_types": _MIXED,
            "num_kv_shared_layers": 1,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_active_idx": 0,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 30.0,
        }
    },
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": _LFM2},
    "lille-130m": {"n_embd": 128},
    "llama4": {
        "text_config": {"attention_chunk_size": WINDOW, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1}
    },
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 4},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL], "conv_L_cache": 3, "num_dense_layers": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"zero_expert_type": "identity", **_LONGCAT},
    "longcat_flash_ngram": _LONGCAT,
    "mamba2": {"time_step_limit": [0.0, 10.0], "num_heads": 4, "head_dim": 16, "intermediate_size": 64},
    "mellum": {"layer_types": _MIXED, "rope_parameters": {kind: {"rope_theta": 10000.0} for kind in (_FULL, _SLIDING)}},
    "mimo_v2_flash": {
        "moe_layer_freq": [0, 1, 1, 1],
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minimax_m3_vl": {
        "text_config": {
            "sparse_attention_config": {
                "sparse_num_index_heads": 1,
                "sparse_index_dim": 16,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 2,
            }
        }
    },
    "minicpm3": {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "laguna": {"layer_types": _MIXED},
    "ministral3": {"rope_parameters": _LLAMA4, "layer_types": _MIXED},
    "mistral4": {"rope_parameters": {**_LLAMA4, "type": "default"}},
    "mistral3": {"text_config": {"model_type": "llama"}},
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0],
            "layer_types": _MIXED,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
            "final_logit_softcapping": 30.0,
        }
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "-", "M", "*"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
    },
    "openelm": {
        "num_query_heads": [2] * 4,
        "num_kv_heads": [1] * 4,
        "ffn_multipliers": [2.0] * 4,
        "share_input_output_layers": False,
    },
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "logits_soft_cap": 30.0},
    "spark2_5": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (_FULL, _SLIDING)},
        "layer_types": _MIXED,
    },
    "step3p5": {"num_attention_groups": 1, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32},
}


def all_names() -> list[str]:
    """Modules of mlx-lm that hold a model."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        text = Path(str(importlib.util.find_spec(f"mlx_lm.models.{module.name}").origin)).read_text("utf-8")  # type: ignore[union-attr]
        if "class ModelArgs" in text and "class Model(" in text and module.name not in _NO_MODELS:
            found.append(module.name)
    return found


def _module(name: str) -> Any:
    if name == "muse_spark":
        return import_muse_spark()
    return importlib.import_module(f"mlx_lm.models.{name}")


def config_of(name: str) -> dict[str, Any]:
    """Raises what importing the architecture raises."""
    config = {"model_type": name, **_fields(_module(name).ModelArgs)}
    if name in _TEXT_CLASSES:
        module, text = _TEXT_CLASSES[name]
        config["text_config"] = {"model_type": module, **_fields(getattr(_module(module), text))}
    for key, value in copy.deepcopy(SPECIAL.get(name, {})).items():
        config[key] = (
            {**config[key], **value} if isinstance(config.get(key), dict) and isinstance(value, dict) else value
        )
    return {key: value for key, value in config.items() if value is not ...}


def _fields(arguments: Any) -> dict[str, Any]:
    hints = get_type_hints(arguments)
    found = {}
    for each in dataclasses.fields(arguments):
        required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if each.name in _SIZES:
            found[each.name] = _SIZES[each.name]
        elif each.name == "text_config":
            found[each.name] = dict(TEXT)
        elif required:
            found[each.name] = _value(hints[each.name])
    return found


TEXT = {key: _SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
TEXT |= {key: _SIZES[key] for key in ("intermediate_size", "head_dim", "vocab_size", "max_position_embeddings")}
TEXT |= {key: _SIZES[key] for key in ("rms_norm_eps", "rope_theta", "tie_word_embeddings")}


def _value(hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if origin in (list, tuple):
        return []
    if origin is dict:
        return {}
    kinds = get_args(hint) or (hint,)
    return next((value for kind, value in ((bool, False), (int, 8), (float, 1.0), (str, "")) if kind in kinds), None)


def make(name: str, **changes: Any) -> Any:
    """The model, in float32, with weights that make the greedy text varied; the same for every call.

    `changes`: of its configuration.
    """
    module = _module(name)
    return with_weights(module.Model(module.ModelArgs.from_dict(config_of(name) | changes)))


def with_weights(model: Any, seed: int = 5) -> Any:
    """The model itself, in float32: the same random weights for the same seed."""
    mx.random.seed(seed)
    model.update(tree_unflatten([(path, _weights(path, old)) for path, old in tree_flatten(model.parameters())]))
    model.eval()
    mx.eval(model.parameters())
    return model


def greedy(model: Any, prompt: Sequence[int], count: int, cache: Any = None) -> list[int]:
    """What the model says, one token a pass, behind a prompt that it reads in one."""
    cache, said = make_prompt_cache(model) if cache is None else cache, list[int]()
    logits = model(mx.array([list(prompt)]), cache=cache)
    while len(said) < count:
        said.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([said[-1:]]), cache=cache)
    return said


def _weights(path: str, old: mx.array) -> Any:
    if old.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return old
    if "embed" in path or path.endswith("wte.weight"):
        return mx.random.normal(old.shape)
    if "conv" in path and old.ndim == 3:
        return mx.random.normal(old.shape) * 0.5
    if old.ndim >= 2:
        return mx.random.normal(old.shape) * (1.5 / old.shape[-1] ** 0.5)
    if "norm" in path or "bias" in path:
        return old.astype(mx.float32) + mx.random.normal(old.shape) * 0.05
    return old.astype(mx.float32)
