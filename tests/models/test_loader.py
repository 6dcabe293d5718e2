"""What is looked at before a checkpoint's weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import OutOfMemory
from start_llm.core.settings import load_settings
from start_llm.models import loader
from start_llm.models.checkpoint import INDEX, weights_on_disk
from start_llm.models.device import GIB, Device
from tests.models.loading import MACHINE, load_model
from tests.oracle import build_oracle
from tests.vision.oracle import build_vision_oracle


def sparse(path: Path, nbytes: int) -> None:
    """A file of that size that takes no room on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)


def test_the_index_says_how_much_the_weights_take(tmp_path: Path) -> None:
    sparse(tmp_path / "model-00001-of-00002.safetensors", 100)
    sparse(tmp_path / "optimizer.safetensors", 1000)
    assert weights_on_disk(tmp_path) == 100
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 5000}}))
    assert weights_on_disk(tmp_path) == 5000
    for odd in ("", "[]", "{}", '{"metadata": null}', '{"metadata": {"total_size": "x"}}'):
        (tmp_path / INDEX).write_text(odd)
        assert weights_on_disk(tmp_path) == 100, odd


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    sparse(tmp_path / "model.safetensors", 30 * GIB)
    with pytest.raises(OutOfMemory, match=r"32\.2 GB of the 25\.8 GB.*125%.*34\.4 GB"):
        load_model(load_settings(None, model_path=str(tmp_path)))


def test_only_a_model_that_leaves_little_is_loaded_with_a_warning(tmp_path: Path) -> None:
    folder = build_oracle(tmp_path / "oracle", "plain")
    settings = load_settings(None, model_path=str(folder), trust_remote_code=True)
    said: list[str] = []
    for machine in (MACHINE, Device("Linux", "unknown chip", 0, "cpu", 0)):
        load_model(settings, said.append, machine)
    assert said == []
    tight = Device("Linux", "some CPU", 4 * GIB, "cpu", weights_on_disk(folder) + GIB + GIB // 4)
    load_model(settings, said.append, tight)
    assert len(said) == 1 and "leaves 268.4 MB" in said[0]


@pytest.mark.parametrize("share", [0.69, 0.71])
def test_a_model_that_sees_is_refused_over_seventy_percent(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_vision_oracle(tmp_path / "oracle")
    machine = Device("Linux", "some CPU", 100 * GIB, "cpu", 90 * GIB)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": int(share * 100 * GIB)}, "weight_map": {}}))
    tried: list[Path] = []

    def load_vision(folder: Path, config: dict[str, Any], tokenizer: Any) -> None:
        tried.append(folder)
        raise RuntimeError("it is loaded")

    monkeypatch.setattr(loader, "load_vision", load_vision)
    expected: type[Exception] = OutOfMemory if share > 0.7 else RuntimeError
    words = r"76\.2 GB of this machine's 107\.4 GB \(71%\).*VISION=off" if share > 0.7 else "it is loaded"
    with pytest.raises(expected, match=words) as found:
        load_model(load_settings(None, model_path=str(folder)), device=machine)
    assert getattr(found.value, "status", 0) == (507 if share > 0.7 else 0) and bool(tried) == (share < 0.7)


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [({}, 90 * GIB, "large-model"), ({"model_type": "qwen3_vl", "vision_config": {}}, 23 * GIB, "VISION=off")],
    ids=["text", "sees"],
)
def test_weights_that_do_not_fit_are_not_downloaded(
    config: dict[str, Any], size: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pull(source: str, progress: Any, *, check: Any) -> Any:
        asked.append(source)
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}}))
        check(tmp_path)
        raise AssertionError("the weights were downloaded")

    monkeypatch.setattr("start_llm.models.pull.pull", pull)
    settings: Any = load_settings(None, model_path="someone/large-model")
    with pytest.raises(OutOfMemory, match=words):
        load_model(settings)
    assert asked == ["someone/large-model"]
