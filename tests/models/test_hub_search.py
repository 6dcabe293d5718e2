"""Search on a hub that runs here: what is said of each model, and one rule of what fits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from start_llm.cli.fetched import main_search
from start_llm.core.settings import Settings
from start_llm.models.hub_search import kv_numbers, search_hub
from start_llm.models.pull import PullError
from start_llm.models.recommended import KV_TOKENS, needed_bytes
from tests.models.hub import running

CONFIG = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def test_what_is_said_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"max_position_embeddings": 4096, "quantization": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | more))
    with running(tmp_path) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        found, odd = search_hub("model")
        assert main_search(Settings(_env_file=None), argparse.Namespace(words=["model"], json=False)) == 0  # type: ignore[call-arg]
    assert (found.name, found.downloads, found.bytes) == ("owner/model", 7, 4 * 1000 + 2 * 50)
    assert (found.quantisation, found.context) == ("4-bit", 4096)
    assert found.needs == needed_bytes(4100, 2 * 8 * 2 * 16, KV_TOKENS)
    assert [found.fits(found.needs), found.fits(found.needs - 1), found.fits(0)] == [True, False, None]
    assert (odd.bytes, odd.context, odd.needs, odd.fits(1)) == (None, None, None, None)
    printed = capsys.readouterr().out
    assert "owner/model" in printed and "4-bit" in printed and "4,096" in printed


def test_no_hub_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PullError, match=r"^A list of models for 'some model' is not here, and Hugging Face cannot"):
        search_hub("some model")


def test_layers_whose_kv_grows() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    assert kv_numbers(CONFIG | {"layer_types": kinds}) == 2 * 2 * 2 * 16
    assert kv_numbers({"text_config": CONFIG | {"full_attention_interval": 4, "head_dim": 32}}) == 2 * 2 * 2 * 32
    assert kv_numbers({}) is None and kv_numbers(CONFIG | {"num_attention_heads": 0}) is None
