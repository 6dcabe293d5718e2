"""Heads that mlx-vlm has modules for, in the interface of `head.Drafter`. Model thread only.

A head's module was made to hold the KV of one conversation. Here the row holds it, with the model's own, and lends it
to the module while that computes. So a head is cut, shared, restored and stored like any other layer.

All uses of mlx-vlm's internals that heads need are here: `load_drafter`, `get_mtp_splitter`, and of its modules `bind`,
`make_cache`, `_input_embed`, `_input_embed_scale`, `_forward_hidden`, `_forward_tokens`, `_cache`, `_next_position`,
`_lm_head_fn`, `_logits`, `d2t`. A test for each kind fails when one of them changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteDecoderLayer, ModelArgs

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.row import Cache
from start_llm.models.checkpoint import read_config
from start_llm.models.stepwise import read_weights


class QwenHead:
    """The MTP head of Qwen3.5, Qwen3.6 and Qwen3-Next. It uses the model's own embedding and output projection.

    Attributes:
        captured: layers of the model whose outputs it reads, side by side; none: what the output projection is given.
    """

    reads_hidden = True
    captured: tuple[int, ...] = ()

    def __init__(self, module: Any, language: Any, vocabulary: int) -> None:
        """`language`: the language model, of mlx-lm or mlx-vlm. `vocabulary`: its tokens."""
        del vocabulary
        self._module = module
        backbone = getattr(language, "backbone", None)
        if backbone is None:
            module.bind(language)
        else:  # Nemotron-H; `bind` wants mlx-vlm's class of it
            module._input_embed, module._lm_head_fn = backbone.embeddings, language.lm_head

    def make_cache(self) -> Cache:
        return [_own_layer(layer) for layer in self._module.make_cache()]

    def parameters(self) -> Any:
        return self._module.parameters()

    def extend(self, tokens: mx.array, hidden: mx.array | None, cache: Cache) -> mx.array:
        module = self._module
        embedded = module._input_embed(tokens) * module._input_embed_scale
        return cast(mx.array, module._forward_hidden(embedded, hidden, cache, None))

    def logits(self, state: mx.array) -> mx.array:
        return cast(mx.array, self._module._lm_head_fn(state))


class SteppedHead(QwenHead):
    """The MTP heads of Nemotron-H and of GLM-5 (`glm_moe_dsa`), which compute with the cache of their own session."""

    def extend(self, tokens: mx.array, hidden: mx.array | None, cache: Cache) -> mx.array:
        module, first = self._module, cache[0]
        module._cache = cache
        module._next_position = (first.caches[0] if isinstance(first, CacheList) else first).offset
        found = module._forward_tokens(tokens, hidden, tokens.dtype)
        module._cache = []
        return cast(mx.array, found[0] if isinstance(found, tuple) else found)


class EagleHead(SteppedHead):
    """EAGLE-3: reads three layers of the model, and may know only the most frequent tokens of its vocabulary."""

    def __init__(self, module: Any, language: Any, vocabulary: int) -> None:
        super().__init__(module, language, vocabulary)
        self._vocabulary = vocabulary
        layers, config = len(language.model.layers), module.config
        behind = config.eagle_aux_hidden_state_layer_ids or (2, layers // 2, layers - 3)
        self.captured = tuple(max(0, layer - 1) for layer in behind)
        self._tokens = None if module.d2t is None else mx.arange(module.d2t.size) + module.d2t

    def logits(self, state: mx.array) -> mx.array:
        logits = cast(mx.array, self._module._logits(state))
        if self._tokens is None:
            return in_vocabulary(logits, self._vocabulary)
        full = mx.full((*logits.shape[:-1], self._vocabulary), -mx.inf, logits.dtype)
        full[..., self._tokens] = logits
        return full


class GlmLiteHead:
    """The MTP head of GLM-4.7-Flash. mlx-vlm reads its weights and has no module for it; the layer is mlx-lm's."""

    reads_hidden = True
    captured: tuple[int, ...] = ()

    def __init__(self, module: GlmLiteModule, language: Any, vocabulary: int) -> None:
        del language, vocabulary
        self._module = module

    def make_cache(self) -> Cache:
        return [KVCache()]

    def parameters(self) -> Any:
        return self._module.parameters()

    def extend(self, tokens: mx.array, hidden: mx.array | None, cache: Cache) -> mx.array:
        return self._module.model(tokens, hidden, cache[0])

    def logits(self, state: mx.array) -> mx.array:
        return cast(mx.array, self._module.lm_head(state))


class _GlmLiteInner(nn.Module):  # type: ignore[misc]
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.embed_tokens = nn.Embedding(args.vocab_size, size)
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.mtp_block = Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers)
        self.shared_head_norm = nn.RMSNorm(size, eps)

    def __call__(self, tokens: mx.array, hidden: mx.array | None, cache: Any) -> mx.array:
        both = mx.concatenate([self.enorm(self.embed_tokens(tokens)), self.hnorm(hidden)], axis=-1)
        x = self.eh_proj(both)
        mask = create_attention_mask(x, cache, return_array=True)
        return cast(mx.array, self.shared_head_norm(self.mtp_block(x, mask, cache=cache)))


class GlmLiteModule(nn.Module):  # type: ignore[misc]
    """With the names of weights that mlx-vlm's splitter writes."""

    def __init__(self, text_config: dict[str, Any]) -> None:
        super().__init__()
        args = ModelArgs.from_dict(text_config)
        self.model = _GlmLiteInner(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)


HEADS: dict[str, Callable[[Any, Any, int], Any]] = {
    "qwen3_5_mtp": QwenHead,
    "nemotron_h_mtp": SteppedHead,
    "glm_moe_dsa_mtp": SteppedHead,
    "glm4_moe_lite_mtp": GlmLiteHead,
    "eagle3": EagleHead,
}
"""By the architecture of the head."""


def load_head(folder: Path, language: Any, vocabulary: int) -> Generator[float, None, Any]:
    """The head in `folder`, a drafter's or a whole checkpoint's, some weights at a step. Raises whatever mlx-vlm does.

    Args:
        language: the language model that it drafts for.
        vocabulary: its tokens.
    """
    config = read_config(folder)
    drafters = import_module("mlx_vlm.speculative.drafters")
    splitter = drafters.get_mtp_splitter(source_config=config)
    kind = config.get("model_type") if splitter is None else splitter.output_model_type
    kind = kind or config.get("speculators_model_type")
    if kind not in HEADS:
        raise NotSupported(f"heads of the kind {kind} are not used here")
    if kind == "glm4_moe_lite_mtp":
        module = _glm_lite(folder, config, splitter)
    else:
        module, _ = drafters.load_drafter(str(folder), lazy=True)
    yield from read_weights(module)
    return HEADS[kind](module, language, vocabulary)


def in_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """Logits for so many tokens; both models' vocabularies are often padded, to other sizes."""
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-mx.inf, logits.dtype))


def _own_layer(layer: Any) -> Any:
    """mlx-lm's cache in place of mlx-vlm's. Raises NotSupported: it cannot be cut at every token."""
    inside = getattr(layer, "caches", None)
    if inside is not None:
        return CacheList(*map(_own_layer, inside))
    if type(layer).__name__ != "KVCache":
        raise NotSupported("its KV cannot be cut at every token, so it cannot draft")
    return KVCache()


def _glm_lite(folder: Path, config: dict[str, Any], splitter: Any) -> GlmLiteModule:
    if splitter is not None:
        config, weights = splitter.prepare(folder, source_config=config)
    else:
        weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= cast(dict[str, mx.array], mx.load(str(file)))
    module = GlmLiteModule(config["text_config"])
    if quantization := config.get("quantization"):
        sizes = {name: quantization[name] for name in ("group_size", "bits", "mode") if name in quantization}
        nn.quantize(module, **sizes, class_predicate=lambda path, _: f"{path}.scales" in weights)
    module.load_weights(list(weights.items()))
    module.eval()
    return module
