"""Tiny models with something that drafts for them, made in memory and trained for seconds where it has to be right."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig, Qwen3_5MTPDraftModel

from start_llm.engine.decode.head import HeadedModel, SmallModel, language_of
from start_llm.engine.decode.upstream_heads import QwenHead
from start_llm.engine.vision import VisionModel
from tests.engine import vision_zoo
from tests.engine.zoo import CONFIGS, VOCAB, fresh
from tests.models.architectures import with_weights
from tests.oracle.build import build_oracle, make_tokenizer


def head_config() -> dict[str, Any]:
    text = {**copy.deepcopy(CONFIGS["qwen3_5"]["text_config"]), "mtp_num_hidden_layers": 1}
    return {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3}


def new_head(seed: int = 6) -> Any:
    return with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict(head_config())), seed)


@cache
def headed(name: str) -> HeadedModel:
    """Of random weights, with the MTP head of ``qwen3_5``.

    ``small``: a llama with another one that drafts. ``same``: a llama that drafts for itself.
    """
    if name in ("small", "same"):
        model = fresh("llama")
        return HeadedModel(model, SmallModel(fresh("llama", 5 if name == "same" else 6), VOCAB), model.model)
    model = fresh(name)
    language = getattr(model, "language_model", model)
    return HeadedModel(model, QwenHead(new_head(), language), language.model)


@cache
def headed_vision() -> HeadedModel:
    model = VisionModel(vision_zoo.make("qwen3_5"), vision_zoo.PAD)
    text = {**vision_zoo.config_of("qwen3_5")["text_config"], "mtp_num_hidden_layers": 1}
    module = with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), 6)
    return HeadedModel(model, QwenHead(module, language_of(model)), language_of(model).model)


def sentences(key: mx.array, rows: int, length: int, noise: float = 0.0) -> mx.array:
    """Text of a tiny language: each sentence counts up in steps of its own; some tokens start it anew elsewhere."""
    first, steps, jumps, places = mx.random.split(key, 4)
    jump = mx.where(mx.random.uniform(shape=(rows, length), key=jumps) < noise, 1, 0)
    jump = mx.cumsum(jump * mx.random.randint(0, VOCAB, (rows, length), key=places), axis=1)
    step = mx.random.randint(1, 5, (rows, 1), key=steps)
    return (mx.random.randint(0, VOCAB, (rows, 1), key=first) + step * mx.arange(length)[None] + jump) % VOCAB


class _Both(nn.Module):
    """What model and head say: of the next token, of the one behind it, and of the third."""

    def __init__(self, language: Any, head: Any) -> None:
        super().__init__()
        self.language, self.head = language, head

    def __call__(self, tokens: mx.array) -> list[mx.array]:
        inner, project = self.language.model, self.language.lm_head
        state = inner(tokens)
        said = [project(state)]
        for ahead in (1, 2):
            places = mx.tile(mx.arange(tokens.shape[1] - ahead)[None, None], (3, 1, 1))
            state = self.head._forward_hidden(inner.embed_tokens(tokens[:, ahead:]), state[:, :-1], None, places)
            said.append(project(state))
        return said


@cache
def trained(passes: int = 70) -> HeadedModel:
    """A qwen3_5 that has learnt `sentences`, and its head: right more often than not. Takes seconds."""
    model, head = fresh("qwen3_5", 11), new_head(12)
    both = _Both(model.language_model, head)

    def loss(both: Any, tokens: mx.array) -> mx.array:
        pairs = zip(both(tokens), (5, 6, 7), strict=True)
        return sum(nn.losses.cross_entropy(said[:, 4:-1], tokens[:, at:], reduction="mean") for said, at in pairs)

    both.train()
    step, optimiser = nn.value_and_grad(both, loss), optim.Adam(learning_rate=5e-3)
    for number in range(passes):
        lost, gradients = step(both, sentences(mx.random.key(number), 12, 28, noise=0.06))
        optimiser.update(both, gradients)
        mx.eval(both.parameters(), optimiser.state, lost)
    both.eval()
    return HeadedModel(model, QwenHead(head, model.language_model), model.language_model.model)


def write_checkpoint(folder: Path, seed: int = 5, with_head: bool = True) -> Path:
    """A qwen3_5 with its head, as a checkpoint that mlx-lm loads, and the oracle's tokenizer."""
    build_oracle(folder)
    (folder / "oracle_model.py").unlink()
    size = make_tokenizer().get_vocab_size()
    text = {**head_config()["text_config"], "vocab_size": size}
    config = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = with_weights(model_class(args_class.from_dict(config)), seed)
    head = with_weights(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), seed + 1)
    weights = dict(tree_flatten(model.parameters()))
    weights |= {f"mtp.{name}": array for name, array in tree_flatten(head.parameters()) if with_head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
