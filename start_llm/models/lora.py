"""Puts an adapter on a loaded model. Model thread only. The base's weights stay as they are, quantised or not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from start_llm.core.errors import NotSupported
from start_llm.models.adapter import Adapter

_OWN = frozenset({"lora_a", "lora_b", "m"})


def apply_adapter(model: Any, adapter: Adapter, source: str) -> None:
    """Changes `model`. Raises NotSupported if the adapter's weights are not those that this model would have.

    Args:
        source: the model's name, for errors.
    """
    try:
        linear_to_lora_layers(model, adapter.layers, dict(adapter.parameters), use_dora=adapter.kind == "dora")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise NotSupported(f"The adapter {adapter.name} cannot be put on {source}: {error}") from error
    wanted = {
        name: tuple(array.shape)
        for name, array in tree_flatten(model.parameters())
        if name.rsplit(".", 1)[-1] in _OWN and _is_new(name, adapter)
    }
    _check(adapter, wanted, source)
    trained: Any = mx.load(str(adapter.weights))
    model.load_weights(list(trained.items()), strict=False)
    model.eval()  # else its dropout would be at work


def _is_new(name: str, adapter: Adapter) -> bool:
    """``m`` is an adapter's own only where it is of the kind that has one."""
    return not name.endswith(".m") or adapter.kind == "dora"


def _check(adapter: Adapter, wanted: dict[str, tuple[int, ...]], source: str) -> None:
    trained = f" It was trained on {adapter.base}." if adapter.base else ""
    strange = sorted(adapter.shapes.keys() - wanted.keys())
    if strange:
        raise NotSupported(
            f"The adapter {adapter.name} does not fit {source}: {len(strange)} of its weights have no place there, "
            f"e.g. {strange[0]}.{trained}"
        )
    for name, shape in adapter.shapes.items():
        if shape != wanted[name]:
            raise NotSupported(
                f"The adapter {adapter.name} does not fit {source}: {name} has the shape {shape}, where {wanted[name]} "
                f"is needed.{trained}"
            )
    missing = sorted(wanted.keys() - adapter.shapes.keys())
    if missing:
        raise NotSupported(
            f"The adapter {adapter.name} is not complete for {source}: {len(missing)} weights are missing, e.g. "
            f"{missing[0]}.{trained}"
        )
