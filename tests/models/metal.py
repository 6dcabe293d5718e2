"""Plain operations in place of mlx-lm's fused Metal kernels, where there is no Metal: what Muse Spark computes."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import mlx.core as mx

F32 = mx.float32


def _norm(x: mx.array, eps: float) -> mx.array:
    x = x.astype(F32)
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> list[mx.array]:
    scores = mx.sigmoid(logits.astype(F32) * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen.astype(mx.uint32), weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return (_norm(stream, norm.eps) * norm.weight.astype(F32)).astype(dtype)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    weighed = branch if post_weight is None else (post_weight.astype(branch.dtype) * branch).astype(branch.dtype)
    added = alpha * stream.astype(F32) + beta * _norm(weighed, post_eps).astype(branch.dtype).astype(F32)
    return added, None if next_norm is None else pre_norm(added, next_norm, dtype=branch.dtype)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    normed = _norm(experts.astype(F32) * norm_weight.astype(F32), eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], -1, head_dim)
    queries, keys = mx.split(_norm(heads, eps).astype(qkvg.dtype), [n_heads], axis=-2)
    return [(queries * query_scale).astype(qkvg.dtype), keys]


def qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: Any, **how: Any) -> list[mx.array]:
    return [
        mx.fast.rope(
            each.swapaxes(1, 2), each.shape[-1], traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(1, 2)
        for each in qk_norm(qkvg, **how)
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    normed = _norm(x, eps).swapaxes(1, 2).reshape(gate.shape)
    return (normed * mx.sigmoid(gate.astype(F32))).astype(x.dtype)


def import_muse_spark() -> Any:
    """The module `mlx_lm.models.muse_spark`."""
    if mx.metal.is_available():
        return importlib.import_module("mlx_lm.models.muse_spark")
    with patch.object(mx.fast, "metal_kernel", lambda **described: None):
        module = importlib.import_module("mlx_lm.models.muse_spark")
    for plain in (
        *(expert_routing, norm_add_norm, post_expert_norm_combine, pre_norm),
        *(qk_norm, qk_norm_rope, rms_norm_sigmoid_gate),
    ):
        setattr(module, plain.__name__, plain)
    return module
