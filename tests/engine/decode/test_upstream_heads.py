"""The heads that are used here, read from a folder of their own and out of a whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import RotatingKVCache

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.upstream_heads import HEADS, QwenHead, _own_layer, load_head
from start_llm.models.background import at_once
from start_llm.models.drafters import own_drafter
from tests.engine.headed import head_config, new_head, write_checkpoint
from tests.engine.zoo import VOCAB, fresh


def guesses(head: Any) -> mx.array:
    """Of some tokens behind some others, with hidden states that mean nothing."""
    mx.random.seed(4)
    cache, hidden = head.make_cache(), mx.random.normal((1, 6, 32))
    state = head.extend(mx.array([[5, 1, 8, 9, 3, 2]]), hidden, cache)[:, -1:]
    state = head.extend(mx.array([[7]]), state, cache)
    return head.logits(state)


def test_a_head_is_read_from_a_folder(tmp_path: Path) -> None:
    module, language = new_head(), fresh("qwen3_5").language_model
    (tmp_path / "config.json").write_text(json.dumps(head_config()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(module.parameters())), {"format": "mlx"})
    expected = guesses(QwenHead(module, language))
    assert expected.shape == (1, 1, VOCAB)
    assert mx.allclose(guesses(at_once(load_head(tmp_path, language))), expected, rtol=0.02, atol=0.02)


def test_a_head_is_read_out_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert own_drafter(folder, config) is not None
    head = at_once(load_head(folder, fresh("qwen3_5").language_model))
    names = {name for name, _ in tree_flatten(head.parameters())}
    assert names == {name for name, _ in tree_flatten(new_head().parameters())}
    stored = {name: array for name, array in mx.load(str(folder / "model.safetensors")).items() if "mtp." in name}
    for name, array in tree_flatten(head.parameters()):
        there = stored[f"mtp.{name}"]
        # The splitter adds 1 to the weights of norms, as the makers store them less 1.
        assert any(mx.allclose(array, there + more, rtol=0.02, atol=0.02) for more in (0.0, 1.0)), name


def test_a_head_whose_kv_cannot_be_cut_is_refused() -> None:
    with pytest.raises(NotSupported, match="its KV cannot be cut at every token"):
        _own_layer(RotatingKVCache(max_size=8))


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_assistant"}')
    with pytest.raises(NotSupported, match="heads of the kind gemma4_assistant are not used here"):
        at_once(load_head(tmp_path, None))
    assert "gemma4_assistant" not in HEADS
