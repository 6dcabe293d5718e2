"""Heads that mlx-vlm has modules for, with the methods of `head.SmallModel`. Model thread only.

A head's module was made to hold the KV of one conversation. Here the row holds it, with the model's own, and lends it
to the module while that computes. So a head is cut, shared, restored and stored like any other layer.

All uses of mlx-vlm's internals that heads need are here: `load_drafter`, `get_mtp_splitter`, and of its modules `bind`,
`make_cache`, `_input_embed`, `_input_embed_scale`, `_forward_hidden`, `_lm_head_fn`. A test fails when one changes.

Only the family that was built end to end is used. Another one is a class with the methods of `QwenHead`, its line in
`HEADS`, and its line in `models.drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from start_llm.core.errors import NotSupported
from start_llm.core.extras import check_installed
from start_llm.engine.decode.row import Cache
from start_llm.models.checkpoint import read_config
from start_llm.models.stepwise import read_weights


class QwenHead:
    """The MTP head of Qwen3.5, Qwen3.6 and Qwen3-Next. It uses the model's own embedding and output projection."""

    reads_hidden = True

    def __init__(self, module: Any, language: Any) -> None:
        """`language`: the language model, of mlx-lm or mlx-vlm."""
        self._module = module
        module.bind(language)

    def make_cache(self) -> Cache:
        return [_own_layer(layer) for layer in self._module.make_cache()]

    def parameters(self) -> Any:
        return self._module.parameters()

    def extend(self, tokens: mx.array, hidden: mx.array | None, cache: Cache) -> mx.array:
        """See `SmallModel.extend`. Returns guesses of the hidden states behind the tokens, [rows, tokens, width]."""
        module = self._module
        embedded = module._input_embed(tokens) * module._input_embed_scale
        return cast(mx.array, module._forward_hidden(embedded, hidden, cache, None))

    def logits(self, state: mx.array) -> mx.array:
        return cast(mx.array, self._module._lm_head_fn(state))


HEADS: dict[str, Callable[[Any, Any], Any]] = {"qwen3_5_mtp": QwenHead}
"""By the architecture of the head."""


def load_head(folder: Path, language: Any) -> Generator[float, None, Any]:
    """The head in `folder`, a drafter's or a whole checkpoint's, some weights at a step. Raises whatever mlx-vlm does.

    `language`: the language model that it drafts for.
    """
    config = read_config(folder)
    check_installed("mlx_vlm")
    drafters = import_module("mlx_vlm.speculative.drafters")
    splitter = drafters.get_mtp_splitter(source_config=config)
    kind = config.get("model_type") if splitter is None else splitter.output_model_type
    if kind not in HEADS:
        raise NotSupported(f"heads of the kind {kind} are not used here")
    module, _ = drafters.load_drafter(str(folder), lazy=True)
    yield from read_weights(module)
    return HEADS[kind](module, language)


def in_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """Logits for so many tokens; both models' vocabularies are often padded, to other sizes."""
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-mx.inf, logits.dtype))


def _own_layer(layer: Any) -> Any:
    """mlx-lm's cache in place of mlx-vlm's. Raises NotSupported: it cannot be cut at every token."""
    if type(layer).__name__ != "KVCache":
        raise NotSupported("its KV cannot be cut at every token, so it cannot draft")
    return KVCache()
