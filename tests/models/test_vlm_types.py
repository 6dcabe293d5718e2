"""Text models of types that only mlx-vlm has: read from a folder by the loader, and served as they compute."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from start_llm.core.errors import NotSupported
from start_llm.core.settings import load_settings
from start_llm.engine.vision import LanguageAlone
from tests.models.decode_everywhere import LONG
from tests.models.loading import load_model
from tests.models.vlm_types import save, truth


def load(folder: Path) -> LanguageAlone:
    settings = load_settings(None, model_path=str(folder), cache_dir=folder.parent / "cache")
    return LanguageAlone(load_model(settings).model)


@pytest.mark.parametrize(
    "name", ["minimax_m3", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen4_exp", "hy_v4"))]
)
def test_a_checkpoint_is_read_with_its_language_model_alone(name: str, tmp_path: Path) -> None:
    """Positions in three axes, in one, and none; more tokens than sparse attention keeps, in chunks of other sizes."""
    model = load(save(tmp_path / name, name))
    assert all(not path.startswith("vision") for path in model.language_model.parameters())
    cache, found = model.make_cache(), list[int]()
    for chunk in (LONG[:70], LONG[70:91], LONG[91:]):
        logits = model(mx.array([chunk]), cache=cache)
    for _ in range(4):
        found.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([found[-1:]]), cache=cache)
    assert found == truth(model.language_model, LONG, 4)


@pytest.mark.parametrize("name", ["qwen4_exp", "k2_horizon"])
def test_arrays_that_do_not_fit_are_told_with_layer_and_shape(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / name, name)
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["num_attention_heads"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotSupported, match=r"mlx-vlm cannot load .*\(.*\).*layers\.[03]\.self_attn"):
        load(folder)
