"""Which files draft for a model, by DRAFT_MODEL and what lies in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx_vlm.speculative.drafters import DRAFTER_KIND_BY_MODEL_TYPE
from mlx_vlm.speculative.drafters.mtp_split import MTP_SPLITTERS

from start_llm.core.errors import NotFound
from start_llm.engine.decode.upstream_heads import HEADS
from start_llm.models.checkpoint import read_config
from start_llm.models.drafters import HEAD_FAMILIES, find_drafter, other_vocabulary, own_drafter
from tests.engine.headed import head_config, write_checkpoint
from tests.oracle import build_oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("headed") / "model")


def find(choice: str, folder: Path) -> tuple[str, Path] | None:
    found = find_drafter(choice, folder, read_config(folder), lambda step, part: None)
    return None if found is None else (found.kind, found.folder)


def test_heads_that_are_used_are_in_the_docs_and_known_to_mlx_vlm() -> None:
    assert {family.drafter for family in HEAD_FAMILIES} == set(HEADS) <= set(DRAFTER_KIND_BY_MODEL_TYPE)
    page = Path("docs/drafts.md").read_text("utf-8")
    for family in HEAD_FAMILIES:
        assert set(family.models) <= set(MTP_SPLITTERS)
        assert all(f"`{name}`" in page for name in (*family.models, family.drafter))


def write_head(folder: Path, architecture: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": architecture}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"norm.weight": mx.ones(2)})
    return folder


def test_heads_of_other_families_are_passed_over(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "model", "deepseek_v4")
    mx.save_safetensors(str(folder / "model.safetensors"), {"mtp.0.norm.weight": mx.ones(4)})
    assert own_drafter(folder, read_config(folder)) is None
    other = write_head(tmp_path / "other", "gemma4_assistant")
    assert find(str(other), folder) == ("model", other), "whoever loads it finds that it is no model, and says so"


def test_a_published_head_is_used_where_it_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def fetched(repository: str) -> Path:
        folder = tmp_path / f"models--{repository.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("c0ffee")
        return folder / "snapshots" / "c0ffee"

    model = write_head(fetched("mlx-community/Qwen3.6-27B-8bit"), "qwen3_5")
    assert find("auto", model) is None
    head = write_head(fetched("mlx-community/Qwen3.6-27B-MTP-4bit"), "qwen3_5_mtp")
    assert find("auto", model) == ("head", head)
    assert find("auto", write_head(tmp_path / "Qwen3.6-27B-MLX-4bit", "qwen3_5")) == ("head", head)
    assert find("auto", write_head(tmp_path / "Qwen3.5-27B-4bit", "qwen3_5")) is None


def test_a_checkpoint_with_a_head_drafts_for_itself_unless_it_is_off(checkpoint: Path) -> None:
    assert find("auto", checkpoint) == ("head", checkpoint)
    assert find("off", checkpoint) is None
    assert find(str(checkpoint), checkpoint) == ("head", checkpoint)


def test_without_tensors_of_a_head_a_folder_beside_it_is_found(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "model", "qwen3_5")
    assert find("auto", folder) is None
    beside = tmp_path / "model-mtp"
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(head_config()))
    assert find("auto", folder) == ("head", beside)
    assert find(str(beside), folder) == ("head", beside)


def test_weights_that_were_removed_behind_their_link_stop_no_model(tmp_path: Path) -> None:
    """So a Hugging Face cache looks from which somebody has deleted files: the model is to load all the same."""
    model, beside = write_head(tmp_path / "model", "qwen3_5"), write_head(tmp_path / "model-mtp", "qwen3_5_mtp")
    (beside / "model.safetensors").rename(tmp_path / "gone")
    (beside / "model.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    found = own_drafter(model, read_config(model))
    assert found is not None and (found.folder, found.nbytes) == (beside, 0)


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
