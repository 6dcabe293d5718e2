"""With what requests are drawn that do not say: who says it, and what of the makers' file is passed over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.settings import Settings, load_settings
from start_llm.models.capabilities import Capabilities, Fact, sampling_facts, sampling_report
from start_llm.models.family import families
from start_llm.models.generation_config import FILE, GenerationConfig, read_generation_config
from start_llm.models.overrides import Overrides
from tests.models.loading import load_model
from tests.models.lora import build_adapter, build_base
from tests.vision.oracle import build_vision_oracle

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645], "max_length": 9}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def advised(folder: Path, **values: Any) -> Path:
    (folder / FILE).write_text(json.dumps(values))
    return folder


def test_what_the_makers_recommend(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig()
    assert read_generation_config(advised(tmp_path, **QWEN3)) == GenerationConfig(
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    )
    given = {"temperature": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.05, "top_p": None}
    values = read_generation_config(advised(tmp_path, **given)).values
    assert values == {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.05}
    assert isinstance(values["top_k"], int)
    makers = read_generation_config(advised(tmp_path, **{**QWEN3, "do_sample": False, "repetition_penalty": 1.1}))
    assert makers == GenerationConfig({"repetition_penalty": 1.1}), "no sampling is no recommendation"


@pytest.mark.parametrize(
    ("name", "written", "allowed"),
    [
        ("temperature", "-0.5", "a number from 0 to 2"),
        ("temperature", "2.5", "a number from 0 to 2"),
        ("temperature", "NaN", "a number from 0 to 2"),
        ("temperature", '"0.6"', "a number from 0 to 2"),
        ("temperature", "true", "a number from 0 to 2"),
        ("top_p", "0", "a number from 0.01 to 1"),
        ("top_p", "Infinity", "a number from 0.01 to 1"),
        ("top_p", "[0.9]", "a number from 0.01 to 1"),
        ("top_k", "-2", "a whole number from 0 to 1,000,000"),
        ("top_k", "2.5", "a whole number from 0 to 1,000,000"),
        ("top_k", "NaN", "a whole number from 0 to 1,000,000"),
        ("top_k", "1" + "0" * 400, "a whole number from 0 to 1,000,000"),
        ("min_p", "{}", "a number from 0 to 1"),
        ("repetition_penalty", "0", "a number from 0.01 to 2"),
    ],
)
def test_an_odd_value_is_passed_over_and_sampling_report(tmp_path: Path, name: str, written: str, allowed: str) -> None:
    other, value = ("min_p", 0.5) if name != "min_p" else ("top_p", 0.5)
    (tmp_path / FILE).write_text(f'{{"{name}": {written}, "{other}": {value}}}')
    makers = read_generation_config(tmp_path)
    assert makers.values == {other: value}
    said = sampling_report(sampling_facts(load_settings(None), Overrides(), makers), makers)
    assert said[0] == f"{other} 0.5, as the model's makers recommend" and len(said) == 2
    assert said[1].startswith(f"{FILE}: {name}=") and said[1].endswith(f"it must be {allowed}")
    assert len(said[1]) < 200 and "\n" not in said[1]


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 100_000, '"\ud800', "1" * 5000])
def test_a_file_that_is_none_is_sampling_report(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    makers = read_generation_config(tmp_path)
    assert makers.values == {}
    said = sampling_report(sampling_facts(load_settings(None), Overrides(), makers), makers)
    assert len(said) == 1 and said[0].startswith(f"{FILE} is passed over, it ")


def test_who_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model's file, what somebody has set, the makers, and then this program."""
    override = Overrides(values={"sampling.top_k": 5, "context": 5000})
    makers = GenerationConfig({"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    env = tmp_path / ".env"
    env.write_text("DEFAULT_TOP_P=0.9\n")
    monkeypatch.setenv("DEFAULT_TOP_K", "50")
    facts = sampling_facts(load_settings(env), override, makers)
    assert facts == {
        "temperature": Fact(0.6, "makers"),
        "top_p": Fact(0.9, "setting"),
        "top_k": Fact(5, "file"),
        "min_p": Fact(0.05, "built-in"),
        "repetition_penalty": Fact(1.0, "built-in"),
    }
    off = sampling_facts(load_settings(env, makers_sampling=False), override, makers)
    assert off == facts | {"temperature": Fact(0.1, "built-in")}
    capabilities = Capabilities("", {}, Fact(families()["generic"], "config"), override, facts)
    shown = capabilities.facts
    assert shown["sampling.temperature"] == Fact(0.6, "makers") and shown["sampling.top_k"] == Fact(5, "file")
    of_whisper = replace(capabilities, config={"model_type": "whisper"}).facts
    assert "sampling.temperature" not in of_whisper


def test_nobody_is_told_of_a_value_that_counts_for_nothing() -> None:
    makers = GenerationConfig({"top_p": 0.95}, {"temperature": "temperature is odd"})
    settings = load_settings(None, default_temperature=0.5, default_top_p=0.5)
    assert sampling_report(sampling_facts(settings, Overrides(), makers), makers) == []


def test_a_text_model_with_an_adapter_and_one_that_sees_follow_their_makers(tmp_path: Path) -> None:
    base = advised(build_base(tmp_path / "tiny-base"), **QWEN3, min_p="0")
    adapter = build_adapter(tmp_path / "adapter", base)
    seeing = advised(build_vision_oracle(tmp_path / "seeing"), **QWEN3, min_p="0")
    for more in ({"model_path": str(base), "adapter_path": str(adapter)}, {"model_path": str(seeing)}):
        said: list[str] = []
        settings = load_settings(None, trust_remote_code=True, **more)
        loaded = load_model(settings, said.append)
        assert (loaded.vision is not None) == (more["model_path"] == str(seeing))
        assert loaded.capabilities.sampling["temperature"] == Fact(0.6, "makers")
        assert loaded.capabilities.facts["sampling.top_k"] == Fact(20, "makers")
        about = [line for line in said if line.startswith("sampling")]
        assert about[0] == "sampling  temperature 0.6, top_p 0.95, top_k 20, as the model's makers recommend"
        assert "min_p='0' is passed over" in about[1] and len(about) == 2
