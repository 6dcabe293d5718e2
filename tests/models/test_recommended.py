from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from start_llm.models.device import GIB
from start_llm.models.recommended import (
    RECOMMENDED,
    SHORT_NAMES,
    SOURCE,
    bandwidth,
    full_name,
    outdated,
    published_head,
    recommend,
    recommended_model,
    tokens_per_second,
)


def test_kv_of_a_long_conversation_is_computed_from_the_config() -> None:
    model = next(model for model in RECOMMENDED if model.short == "qwen3.6-27b")
    assert model.kv_bytes(1) == 2 * 16 * 4 * 256 * 2  # keys and values, layers, heads, size, half precision
    assert model.kv_bytes(32_768) == 2 * GIB


@pytest.mark.parametrize("gib", [8, 16, 32, 48, 64, 128])
def test_three_at_most_that_fit_best_first(gib: int) -> None:
    usable = int(gib * GIB * 0.75)
    found = recommend(gib * GIB, usable)
    assert 1 <= len(found) <= 3 and found == [model for model in RECOMMENDED if model in found]
    assert all(model.weights + model.kv_bytes(32_768) <= usable for model in found)
    best = recommended_model(gib * GIB)
    assert best is not None and best.least_memory <= gib * GIB
    assert all(model.least_memory > gib * GIB for model in RECOMMENDED[: RECOMMENDED.index(best)])


def test_a_small_machine_is_recommended_nothing() -> None:
    assert recommend(4 * GIB, 3 * GIB) == [] and recommended_model(4 * GIB) is None


def test_a_pool_takes_a_fraction() -> None:
    pooled = next(model for model in RECOMMENDED if model.short == "deepseek-v4-flash")
    assert pooled.kv_bytes(200_000) < 2 * GIB  # 4 and 128 tokens have a row; 43 layers of 512 would take 8 GiB


def test_old_entries_are_told() -> None:
    newest = max(model.seen for model in RECOMMENDED)
    assert outdated(RECOMMENDED, newest) == ""
    later = newest + timedelta(days=91)
    assert outdated(RECOMMENDED[:1], later).startswith("Over 90 days old") and RECOMMENDED[0].short in outdated(
        RECOMMENDED[:1], later
    )


def test_a_published_head_is_known_by_any_conversion_of_its_model() -> None:
    head = "mlx-community/Qwen3.6-27B-MTP-4bit"
    for model in ("mlx-community/Qwen3.6-27B-4bit", "Qwen/Qwen3.6-27B", "somebody/Qwen3.6-27B-MLX-8bit", "Qwen3.6-27B"):
        assert published_head(model) == head
    for other in (head, "mlx-community/Qwen3.6-270B-4bit", "mlx-community/Qwen3-0.6B-4bit", "", "Qwen3.6-27B/mtp"):
        assert published_head(other) == ""


def test_rates_follow_the_memory() -> None:
    model = RECOMMENDED[-1]
    slow, fast = tokens_per_second(model, "Apple M4"), tokens_per_second(model, "Apple M4 Max")
    assert slow is not None and fast is not None and 3 < fast / slow < 4
    assert bandwidth("Intel Xeon") is None and tokens_per_second(model, "Intel Xeon") is None


def test_short_names_are_words_of_their_own() -> None:
    assert len(SHORT_NAMES) == len(RECOMMENDED) and all("/" not in name for name in SHORT_NAMES)
    assert full_name("Qwen3.6-27B") == "mlx-community/Qwen3.6-27B-4bit"
    assert full_name("a/b") == "a/b" and full_name(None) is None
    assert "2026" in SOURCE


def test_a_folder_that_was_put_into_the_cache_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "cache"
    (own / "mine").mkdir(parents=True)
    assert full_name("mine", own) == "mine"  # it has no config.json
    (own / "mine" / "config.json").touch()
    assert full_name("mine", own) == str(own / "mine") and full_name("mine") == "mine" and full_name(None, own) is None
    (tmp_path / "mine").mkdir()
    assert full_name("mine", own) == "mine"  # the folder here
