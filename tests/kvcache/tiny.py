"""Small models with random float32 weights, and caches whose content is known."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

VOCAB = 512
WIDTH = 32

_ATTENTION = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_ATTENTION,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "full_attention_interval": 4,
    },
    "gemma3_text": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        **_ATTENTION,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 16,
        "rope_theta": 150000,
        "rms_norm_eps": 1e-5,
    },
    "glm4_moe_lite": {
        **_ATTENTION,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
    },
    "nemotron_h": {
        **_ATTENTION,
        "head_dim": 16,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": list("M-M*-M"),
        "tie_word_embeddings": False,
    },
    "lfm2": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": WIDTH,
        "block_ff_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": 10000.0,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}


@functools.cache
def model(name: str) -> Any:
    """A model of this type with weights scaled so that greedy output varies."""
    config = {**CONFIGS[name], "model_type": name}
    model_class, args_class = _get_classes(config)
    made = model_class(args_class.from_dict(config))
    mx.random.seed(7)
    weights = []
    for key, value in tree_flatten(made.parameters()):
        if "conv" in key and value.ndim == 3:
            value = mx.random.normal(value.shape) * 0.5
        elif value.ndim >= 2:
            scale = 1.0 if "embed" in key else 1.5 / value.shape[-1] ** 0.5
            value = mx.random.normal(value.shape) * scale
        weights.append((key, value.astype(mx.float32)))
    made.update(tree_unflatten(weights))
    mx.eval(made.parameters())
    return made


def prompt_cache(name: str) -> list[Any]:
    return list(make_prompt_cache(model(name)))


def prefill(name: str, tokens: Sequence[int], cache: list[Any], chunk: int = 24) -> None:
    for at in range(0, len(tokens), chunk):
        model(name)(mx.array([list(tokens[at : at + chunk])]), cache=cache)
        mx.eval([entry.state for entry in cache])


def greedy(name: str, tokens: Sequence[int], cache: list[Any], count: int) -> list[int]:
    """Prefills `tokens` behind `cache`, then decodes."""
    prefill(name, tokens[:-1], cache)
    token, out = int(tokens[-1]), []
    for _ in range(count):
        logits = model(name)(mx.array([[token]]), cache=cache)
        token = int(mx.argmax(logits[0, -1]).item())
        out.append(token)
    return out


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, count)]


# --- caches that hold their own tokens ----------------------------------------


WINDOW = 5


def known_cache(tokens: Sequence[int], hybrid: bool = False) -> list[Any]:
    """Keys hold the tokens, values their negatives.

    The hybrid one also has a state of (sum, count) and a windowed layer of the last tokens.
    """
    row = mx.array(np.asarray(tokens, dtype=np.float32).reshape(1, 1, -1, 1))
    layer = KVCache()
    if len(tokens):
        layer.update_and_fetch(row, -row)
    cache: list[Any] = [layer]
    if hybrid:
        state = ArraysCache(2)
        if len(tokens):
            state[0] = mx.array([[float(sum(tokens))]])
            state[1] = mx.array([[len(tokens)]])
        window = RotatingKVCache(max_size=WINDOW)
        if len(tokens):
            window.update_and_fetch(row, -row)
        cache += [state, window]
    return cache


def read_known(cache: list[Any]) -> list[int]:
    """The tokens in a `known_cache`; fails if its parts disagree."""
    layer = cache[0]
    if layer.keys is None:
        return []
    keys = np.array(layer.keys[0, 0, : layer.offset, 0])
    values = np.array(layer.values[0, 0, : layer.offset, 0])
    assert (keys == -values).all()
    if len(cache) > 1:
        assert float(cache[1][0].item()) == float(keys.sum())
        assert int(cache[1][1].item()) == len(keys)
        window = cache[2]
        rows = np.array(window._temporal_order(window.keys)[0, 0, :, 0])
        assert window.offset == len(keys) and (rows == keys[-len(rows) :]).all() and len(rows) == min(len(keys), WINDOW)
        assert (np.array(window._temporal_order(window.values)[0, 0, :, 0]) == -rows).all()
    return [int(k) for k in keys]
