"""A model that sees does not lose its eyes by the place of its chat template, nor by having none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from start_llm.models.checkpoint import read_config
from start_llm.models.tokenizer import read_tokenizer
from start_llm.models.vision import load_vision


@pytest.mark.parametrize("older", [True, False], ids=["in the older file", "none"])
def test_it_sees(vision_path: Callable[[str], Path], tmp_path: Path, older: bool) -> None:
    folder = Path(shutil.copytree(vision_path("qwen3_vl"), tmp_path / "model"))
    places = load_vision(folder, read_config(folder), read_tokenizer(folder))[1].places(64, 64)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if older:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    wrapper = read_tokenizer(folder)
    _, eyes = load_vision(folder, read_config(folder), wrapper)
    assert wrapper.has_chat_template is older
    assert eyes.places(64, 64) == (places if older else ((), places[1], ()))
