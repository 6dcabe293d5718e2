"""Heads of every kind that is used here, read from a folder of their own and out of a whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.models.cache import CacheList, KVCache, RotatingKVCache

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.upstream_heads import HEADS, _own_layer, load_head
from start_llm.models.background import at_once
from start_llm.models.drafters import own_drafter
from tests.engine.headed import OTHER_HEADS, config_of, fresh, other_head, other_head_config
from tests.engine.zoo import VOCAB

IN_CHECKPOINTS = {
    "nemotron_h": {"": "mtp."},
    "glm_moe_dsa": {"mtp.shared_head_norm.": "model.layers.2.shared_head.norm.", "mtp.": "model.layers.2."},
    "glm4_moe_lite": {
        "model.shared_head_norm.": "model.layers.2.shared_head.norm.",
        "model.mtp_block.": "model.layers.2.",
        "model.": "model.layers.2.",
        "lm_head.": "model.layers.2.shared_head.head.",
    },
}
"""How names of a head's weights begin, and how they begin in the makers' checkpoint."""


def target(name: str) -> Any:
    return fresh("llama" if name == "eagle3" else name)


def rounded_head(name: str) -> Any:
    """Its weights are whole in 16 bits, as a splitter may keep them."""
    module = other_head(name)
    module.update(tree_map(lambda a: a.astype(mx.bfloat16).astype(a.dtype) if a.ndim > 1 else a, module.parameters()))
    return module


def guesses(name: str, head: Any) -> mx.array:
    """Of some tokens behind some others, with hidden states that mean nothing."""
    mx.random.seed(4)
    cache, hidden = head.make_cache(), mx.random.normal((1, 6, 32 * max(1, len(head.captured))))
    state = head.extend(mx.array([[5, 1, 8, 9, 3, 2]]), hidden, cache)[:, -1:]
    state = head.extend(mx.array([[7]]), state, cache)
    return head.logits(state)


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_a_head_is_read_from_a_folder(name: str, tmp_path: Path) -> None:
    module, model = rounded_head(name), target(name)
    (tmp_path / "config.json").write_text(json.dumps(other_head_config(name)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(module.parameters())), {"format": "mlx"})
    head = at_once(load_head(tmp_path, model, VOCAB))
    expected = guesses(name, HEADS[OTHER_HEADS[name]](module, model, VOCAB))
    assert expected.shape == (1, 1, VOCAB) and mx.allclose(guesses(name, head), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", IN_CHECKPOINTS)
def test_a_head_is_read_out_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    module, model = rounded_head(name), target(name)
    weights = {}
    for key, array in tree_flatten(module.parameters()):
        begin, there = next(pair for pair in IN_CHECKPOINTS[name].items() if key.startswith(pair[0]))
        weights[there + key.removeprefix(begin)] = array
    config = config_of(name) | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": ["*"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    assert own_drafter(tmp_path, config) is not None
    head = at_once(load_head(tmp_path, model, VOCAB))
    expected = guesses(name, HEADS[OTHER_HEADS[name]](module, model, VOCAB))
    assert mx.allclose(guesses(name, head), expected, rtol=0.05, atol=0.05)


def test_an_eagle_head_proposes_only_tokens_that_it_knows() -> None:
    module, model = other_head("eagle3"), target("eagle3")
    logits = guesses("eagle3", HEADS["eagle3"](module, model, VOCAB))[0, 0]
    known = set((mx.arange(module.d2t.size) + module.d2t).tolist())
    assert {token for token in range(VOCAB) if logits[token].item() != -mx.inf} == known and len(known) == VOCAB - 20


def test_a_head_whose_kv_cannot_be_cut_is_refused() -> None:
    with pytest.raises(NotSupported, match="its KV cannot be cut at every token"):
        _own_layer(CacheList(KVCache(), RotatingKVCache(max_size=8)))


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_assistant"}')
    with pytest.raises(NotSupported, match="heads of the kind gemma4_assistant are not used here"):
        at_once(load_head(tmp_path, None, VOCAB))
