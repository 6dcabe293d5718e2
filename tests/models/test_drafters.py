"""Which files draft for a model, by DRAFT_MODEL and what lies in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters.mtp_split import MTP_SPLITTERS

from start_llm.core.errors import NotFound
from start_llm.models.checkpoint import read_config
from start_llm.models.drafters import OWN_HEADS, find_drafter, other_vocabulary, own_drafter
from tests.engine.headed import head_config, write_checkpoint
from tests.oracle import build_oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("headed") / "model")


def find(choice: str, folder: Path) -> tuple[str, Path] | None:
    found = find_drafter(choice, folder, read_config(folder), lambda step, part: None)
    return None if found is None else (found.kind, found.folder)


def test_every_family_with_a_head_is_one_that_mlx_vlm_splits() -> None:
    assert set(OWN_HEADS) <= set(MTP_SPLITTERS)


def test_a_checkpoint_with_a_head_drafts_for_itself_unless_it_is_off(checkpoint: Path) -> None:
    assert find("auto", checkpoint) == ("head", checkpoint)
    assert find("off", checkpoint) is None
    assert find(str(checkpoint), checkpoint) == ("head", checkpoint)


def test_without_tensors_of_a_head_a_folder_beside_it_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"model.norm.weight": mx.ones(2)})
    assert find("auto", folder) is None
    beside = tmp_path / "model-mtp"
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(head_config()))
    assert find("auto", folder) == ("head", beside)
    assert find(str(beside), folder) == ("head", beside)


def test_any_other_model_is_taken_for_a_small_one(tmp_path: Path, checkpoint: Path) -> None:
    small = build_oracle(tmp_path / "small")
    assert find(str(small), checkpoint) == ("model", small)
    assert own_drafter(small, read_config(small)) is None


def test_what_is_not_there_is_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(NotFound, match=r"^DRAFT_MODEL=\S+/nowhere: there is no config.json in that folder\.$"):
        find(str(tmp_path / "nowhere"), checkpoint)


def test_a_vocabulary_must_be_the_same_but_for_a_hundredth() -> None:
    words = {f"w{i}": i for i in range(1000)}
    assert not other_vocabulary(words, words) and not other_vocabulary(words, dict(list(words.items())[:995]))
    assert other_vocabulary(words, dict(list(words.items())[:900]))
    assert other_vocabulary(words, {**words, "w3": 4, "w4": 3})
