"""Which model a name means: one model has one entry, whatever it is called and whenever it came to this disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotFound
from start_llm.core.settings import load_settings
from start_llm.models.catalog import EMBEDDED_NAME
from start_llm.poolnames import PoolNames
from tests.oracle import build_oracle


def names(cache: Path, **settings: Any) -> PoolNames:
    return PoolNames(load_settings(None, start_llm_cache_dir=cache, **settings))


def listed(found: PoolNames, cache: Path) -> list[str]:
    """Those below `cache`: the machine's own store of models may have more."""
    return [known.name for known in found.all() if known.key.startswith(str(cache.resolve()))]


def test_a_main_model_that_was_fetched_at_the_start_is_one_model(tmp_path: Path) -> None:
    late = tmp_path / "models" / "late"
    found = names(tmp_path, model_path=str(late))
    assert listed(found, tmp_path) == []
    build_oracle(late)
    found.began("late", str(late), late)
    assert listed(found, tmp_path) == [] and found.find("late") is None


def test_the_embedded_model_is_not_beside_itself(tmp_path: Path) -> None:
    folder = build_oracle(tmp_path / "models" / f"{EMBEDDED_NAME}-f32-v1")
    found = names(tmp_path)
    found.began(EMBEDDED_NAME, EMBEDDED_NAME, folder)
    assert listed(found, tmp_path) == [] and found.find(EMBEDDED_NAME) is None


def test_another_model_of_the_main_one_s_name_has_a_name_of_its_own(tmp_path: Path) -> None:
    main, other = build_oracle(tmp_path / "mine" / "same"), build_oracle(tmp_path / "models" / "same")
    found = names(tmp_path, model_path=str(main))
    found.began("same", str(main), main)
    assert listed(found, tmp_path) == [str(other)] and found.find("same") is None
    known = found.find(str(other))
    assert known is not None and known.name == str(other)


@pytest.mark.parametrize("name", ["fast", "quick"])
def test_models_are_preloaded_and_pinned_by_any_of_their_names(tmp_path: Path, name: str) -> None:
    main, quick = build_oracle(tmp_path / "main"), build_oracle(tmp_path / "models" / "quick")
    given = {"preload_models": f"nobody,{name}", "pinned_models": name}
    found = names(tmp_path, model_path=str(main), model_map="fast=quick", **given)
    found.began("main", str(main), main)
    assert found.is_preloaded("quick") and not found.is_preloaded("main")
    assert found.is_pinned("quick", str(quick)) and not found.is_pinned("main", str(main))


def test_a_listing_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = build_oracle(tmp_path / "main")
    build_oracle(tmp_path / "models" / "quick")
    found = names(tmp_path, model_path=str(main))
    found.began("main", str(main), main)
    monkeypatch.setattr("start_llm.models.names.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("start_llm.models.names.LISTING_SECONDS", 0.0)
    monkeypatch.setattr("start_llm.models.names.stored_models", Mock(side_effect=FileNotFoundError("it has just gone")))
    assert listed(found, tmp_path) == ["quick"]
    with pytest.raises(NotFound, match="this server serves 'main', 'quick'"):
        found.find("nobody")
