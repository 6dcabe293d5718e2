"""A model is loaded with what drafts for it, or says why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotSupported
from start_llm.core.settings import load_settings
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.runtime import TextRuntime
from start_llm.host.home import COMMAND_VARIABLE
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.models.background import at_once
from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES
from start_llm.models.loader import check_small_model
from tests.engine.headed import write_checkpoint
from tests.modelpool.test_builder import on_a_thread
from tests.oracle import build_oracle

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("headed") / "model")


def load(model: Path, cache: Path, look: Callable[[TextRuntime], Any], **more: Any) -> tuple[Any, list[str]]:
    """What `look` sees of the loaded model, and the lines that people are told."""
    settings = load_settings(None, model_path=str(model), start_llm_cache_dir=cache, trust_remote_code=True, **more)
    lines: list[str] = []
    builder = ModelBuilder(settings, lambda need: False, lines.append, lambda step, part: None)
    builder.begin(0)

    def work() -> Any:
        runtime = at_once(builder.first_steps(settings))
        try:
            return look(runtime)
        finally:
            runtime.close()

    return on_a_thread(work), [line for line in lines if line.startswith("drafts ")]


def about(runtime: TextRuntime) -> tuple[bool, bool, str, int]:
    headed = isinstance(runtime.loaded.model, HeadedModel)
    gated = runtime.drafts is not None and runtime.drafts.gate.head is not None
    return headed, gated, runtime.loaded.fingerprint, runtime.loaded.weight_bytes


def test_a_head_in_the_checkpoint_is_used_and_its_kv_is_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    with_head, lines = load(checkpoint, tmp_path, about)
    assert with_head[:2] == (True, True) and lines == ["drafts    its own MTP head drafts for model"]
    without, lines = load(checkpoint, tmp_path, about, draft_model="off")
    assert without[:2] == (False, False) and not lines
    assert with_head[2] != without[2] and with_head[3] > without[3]


def test_kv_on_disk_is_of_the_model_with_its_head(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head has entries of its own in a row: KV without them is no KV of that model."""
    tier = Mock(side_effect=DiskTier)
    monkeypatch.setattr("start_llm.engine.assembly.DiskTier", tier)
    for draft_model in (None, "off"):
        more = {} if draft_model is None else {"draft_model": draft_model}
        found, _ = load(checkpoint, tmp_path, about, kv_disk_dir="auto", **more)
        assert tier.call_args.args[1].startswith(f"{found[2]} ")


def test_a_small_model_drafts_where_its_vocabulary_fits(checkpoint: Path, tmp_path: Path) -> None:
    oracle = build_oracle(tmp_path / "oracle")
    found, lines = load(oracle, tmp_path, about, draft_model=str(checkpoint))
    assert found[:2] == (False, False)
    assert len(lines) == 1 and "does not draft for oracle: it cannot be used: " in lines[0]
    found, lines = load(oracle, tmp_path, about, draft_model=str(build_oracle(tmp_path / "small")))
    assert lines == [f"drafts    the small model {tmp_path / 'small'} drafts for oracle"]
    assert found[:2] == (True, True)


def test_a_drafter_larger_than_what_is_free_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    oracle = build_oracle(tmp_path / "oracle")
    small = build_oracle(tmp_path / "small")
    weights = (small / "model.safetensors").stat().st_size
    needed = PREFILL_BYTES + LEAST_CACHE_BYTES + 2 * weights
    more = {"draft_model": str(small), "pool_memory_bytes": needed}
    assert load(oracle, tmp_path, about, **more)[0][:2] == (True, True)
    found, lines = load(oracle, tmp_path, about, **more | {"pool_memory_bytes": needed - weights})
    assert found[:2] == (False, False)
    sizes = r"its weights take [\d.]+ .?B, and [\d.]+ .?B are free beside the model and the least that a prefill"
    why = rf"drafts    the small model \S+ does not draft for oracle: {sizes} and KV need"
    assert len(lines) == 1 and re.fullmatch(why, lines[0])


@pytest.mark.parametrize("kind", ['"gemma4_assistant"', '["a list"]', "null"])
def test_a_head_of_another_family_drafts_not_and_the_model_is_served(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(f'{{"model_type": {kind}}}')
    (head / "model.safetensors").write_bytes(b"")
    found, lines = load(checkpoint, tmp_path, about, draft_model=str(head))
    assert found[:2] == (False, False)
    why = "neither mlx-lm nor mlx-vlm has a text model of its type; see docs/drafts.md"
    assert lines == [f"drafts    the small model {head} does not draft for model: {why}"]


def test_a_small_model_whose_tokenizer_is_broken_drafts_not(tmp_path: Path) -> None:
    small = build_oracle(tmp_path / "small")
    for text in ("{}", "[]", "{broken", '{"version": "1.0", "model": {"type": "nope"}}'):
        (small / "tokenizer.json").write_text(text, "utf-8")
        with pytest.raises(NotSupported, match="its tokenizer cannot be read"):
            check_small_model(small, None)


def test_a_published_head_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "python3.12 install_and_run.py")
    model = write_checkpoint(tmp_path / "Qwen3.5-4B-MLX-8bit", with_head=False)
    found, lines = load(model, tmp_path, about)
    assert found[:2] == (False, False)
    pull = "python3.12 install_and_run.py pull mlx-community/Qwen3.5-4B-MTP-4bit"
    assert lines == [f"drafts    a head that drafts for Qwen3.5-4B-MLX-8bit is published: {pull}"]
