"""Tiny models with something that drafts for them, made in memory and trained for seconds where it has to be right."""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig, Qwen3_5MTPDraftModel

from start_llm.engine.decode.head import HeadedModel, SmallModel, inside_of, language_of
from start_llm.engine.decode.upstream_heads import HEADS, GlmLiteModule, QwenHead
from start_llm.engine.vision import VisionModel
from tests.engine import vision_zoo
from tests.engine.zoo import CONFIGS, VOCAB, _weights
from tests.oracle.build import build_oracle, make_tokenizer


def head_config() -> dict[str, Any]:
    text = {**copy.deepcopy(CONFIGS["qwen3_5"]["text_config"]), "mtp_num_hidden_layers": 1}
    return {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3}


def fresh(name: str, seed: int = 5) -> Any:
    """A model of `zoo` that nobody else has."""
    config = config_of(name)
    model_class, args_class = _get_classes(config)
    return _random(model_class(args_class.from_dict(config)), seed)


def _random(module: Any, seed: int) -> Any:
    mx.random.seed(seed)
    module.update(tree_unflatten([(name, _weights(name, old)) for name, old in tree_flatten(module.parameters())]))
    module.eval()
    mx.eval(module.parameters())
    return module


def new_head(seed: int = 6) -> Any:
    return _random(Qwen3_5MTPDraftModel(ModelConfig.from_dict(head_config())), seed)


GLM_DSA = {
    **CONFIGS["glm4_moe_lite"],
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 4096,
    "moe_layer_freq": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "attention_bias": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
OTHER_HEADS = {
    "nemotron_h": "nemotron_h_mtp",
    "glm4_moe_lite": "glm4_moe_lite_mtp",
    "glm_moe_dsa": "glm_moe_dsa_mtp",
    "eagle3": "eagle3",
}
"""Kinds of heads by the name that `headed` knows them by."""


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **copy.deepcopy(GLM_DSA if name == "glm_moe_dsa" else CONFIGS[name])}


def other_head_config(name: str) -> dict[str, Any]:
    if name == "eagle3":
        layer = {**CONFIGS["llama"], "num_hidden_layers": 1}
        behind = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": VOCAB - 20}
        return {"model_type": "eagle3", "transformer_layer_config": layer, **behind}
    text = {**config_of(name), "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": ["*"]}
    return {"model_type": OTHER_HEADS[name], "text_config": text}


def other_head(name: str, seed: int = 6) -> Any:
    """Its module, of random weights."""
    config = other_head_config(name)
    if name == "glm4_moe_lite":
        return _random(GlmLiteModule(config["text_config"]), seed)
    found = import_module(f"mlx_vlm.speculative.drafters.{OTHER_HEADS[name]}")
    module = _random(found.Model(found.ModelConfig.from_dict(config)), seed)
    if name == "eagle3":  # it knows every token but some
        known = mx.array([token for token in range(VOCAB) if token % 3 or token > 57])[: VOCAB - 20]
        module.d2t = (known - mx.arange(VOCAB - 20)).astype(mx.int32)
    return module


@cache
def headed(name: str) -> HeadedModel:
    """Of random weights.

    ``small``: a llama with another one that drafts. ``same``: a llama that drafts for itself. ``eagle3``: a llama with
    an EAGLE-3 head. All others are the model's own architecture, with an MTP head; ``llama`` has that of ``qwen3_5``.
    """
    if name in OTHER_HEADS:
        model = fresh("llama" if name == "eagle3" else name)
        drafter = HEADS[OTHER_HEADS[name]](other_head(name), model, VOCAB)
        return HeadedModel(model, drafter, inside_of(model))
    if name in ("small", "same"):
        model = fresh("llama")
        return HeadedModel(model, SmallModel(fresh("llama", 5 if name == "same" else 6), VOCAB), model.model)
    model = fresh(name)
    language = getattr(model, "language_model", model)
    return HeadedModel(model, QwenHead(new_head(), language, VOCAB), language.model)


@cache
def headed_vision() -> HeadedModel:
    model = VisionModel(vision_zoo.make("qwen3_5"))
    text = {**vision_zoo.config_of("qwen3_5")["text_config"], "mtp_num_hidden_layers": 1}
    module = _random(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), 6)
    return HeadedModel(model, QwenHead(module, language_of(model), VOCAB), language_of(model).model)


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
    return HeadedModel(model, QwenHead(head, model.language_model, VOCAB), model.language_model.model)


def write_checkpoint(folder: Path, seed: int = 5, with_head: bool = True) -> Path:
    """A qwen3_5 with its head, as a checkpoint that mlx-lm loads, and the oracle's tokenizer."""
    build_oracle(folder)
    (folder / "oracle_model.py").unlink()
    size = make_tokenizer().get_vocab_size()
    text = {**head_config()["text_config"], "vocab_size": size}
    config = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = _random(model_class(args_class.from_dict(config)), seed)
    head = _random(Qwen3_5MTPDraftModel(ModelConfig.from_dict({**head_config(), "text_config": text})), seed + 1)
    weights = dict(tree_flatten(model.parameters()))
    weights |= {f"mtp.{name}": array for name, array in tree_flatten(head.parameters()) if with_head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
