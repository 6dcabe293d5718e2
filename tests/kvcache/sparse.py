"""Tiny random models with sparse attention: their caches hold pools, keys of an index, windows and recurrent states.

What they attend to is less than the prompts of the tests, so that the pools and the index decide what is seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 100
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
_LORA = {**_COMMON, "intermediate_size": 64, "n_routed_experts": 4, "q_lora_rank": 32}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v4": (
        "mlx_vlm.models.deepseek_v4",
        "ModelConfig",
        {
            **_LORA,
            "qk_rope_head_dim": 16,
            "head_dim": 32,
            "compress_ratios": [0, 128, 4, 0],
            "sliding_window": 16,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 8,
            "num_hash_layers": 1,
        },
    ),
    "hy_v4": (
        "mlx_vlm.models.hy_v4",
        "ModelConfig",
        {
            **_LORA,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "index_head_dim": 32,
            "index_n_heads": 16,
            "index_topk": 8,
        },
    ),
    "qwen4_exp": (
        "mlx_vlm.models.qwen4_exp",
        "TextConfig",
        {
            **_COMMON,
            "model_type": "qwen4_exp",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 2,
            "hc_count": 2,
            "hc_lowrank": 16,
            "head_dim": 32,
            "indexer_n_heads": 2,
            "indexer_head_dim": 32,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "glm5_next": (
        "mlx_vlm.models.glm5_next",
        "TextConfig",
        {
            **_LORA,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "index_topk": 16,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "head_dim": 0,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "index_kpool": 4,
            "qk_head_dim": 16,
            "first_k_dense_replace": 1,
            "hc_mult": 2,
        },
    ),
}


class Positioned:
    """A language model of mlx-vlm with the call interface of mlx-lm; positions are counted."""

    def __init__(self, name: str, inner: Any) -> None:
        self.inner, self.layers = inner, inner.layers
        self._positions = name == "qwen4_exp"

    def make_cache(self) -> list[Any]:
        return list(self.inner.make_cache())

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        cache = self.make_cache() if cache is None else cache
        more = {}
        if self._positions:
            held = max(layer.offset for layer in cache if hasattr(layer, "offset"))
            at = mx.arange(held, held + tokens.shape[1])
            more["position_ids"] = mx.broadcast_to(at[None, None], (3, 1, tokens.shape[1]))
        output = self.inner(tokens, cache=cache, **more)
        logits: mx.array = getattr(output, "logits", output)
        return logits


@functools.cache
def model(name: str) -> Positioned:
    """With weights that make the greedy text varied; the same for every call."""
    package, arguments, config = CONFIGS[name]
    mx.random.seed(5)
    made = importlib.import_module(f"{package}.language").LanguageModel(
        getattr(importlib.import_module(f"{package}.config"), arguments)(**config)
    )
    made.update(tree_unflatten([(path, _weights(path, old)) for path, old in tree_flatten(made.parameters())]))
    made.eval()
    mx.eval(made.parameters())
    return Positioned(name, made)


def _weights(path: str, old: mx.array) -> Any:
    if old.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return old
    old = old.astype(mx.float32)
    if "embed_tokens" in path:
        return mx.random.normal(old.shape)
    if old.ndim >= 2 and "norm" not in path:
        return mx.random.normal(old.shape) * (1.5 / old.shape[-1] ** 0.5)
    return old


def feed(made: Any, tokens: Sequence[int], cache: list[Any]) -> int:
    """Computes these tokens in one pass. Returns the token that the model predicts."""
    logits = made(mx.array([list(tokens)]), cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    return int(mx.argmax(logits[0, -1]).item())


def text(length: int, seed: int = 0) -> list[int]:
    return [(i * 37 + (i * i * (seed + 3)) // 7 + seed) % (VOCAB - 10) + 5 for i in range(length)]
