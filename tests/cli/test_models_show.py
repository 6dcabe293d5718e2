"""``models show``: every fact with who says so, without loading anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from start_llm.__main__ import main
from start_llm.cli import show
from start_llm.core.settings import Settings, load_settings
from start_llm.engine import probe as engine_probe
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck, Fact, WritingHints
from start_llm.models.device import GIB, Device
from start_llm.models.family import families
from start_llm.parsing.registry import output_style
from tests.engine.headed import write_checkpoint
from tests.models.callers import CALLERS, build_caller
from tests.models.loading import load_model
from tests.models.lora import build_adapter, build_base, change

MACHINE = Device("Linux", "some CPU", 32 * GIB, "cpu", 24 * GIB)


def serve_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the table when the model is served; what is told."""
    said: list[str] = []
    loaded = load_model(settings, device=MACHINE)

    def check(*args):
        yield 0.0
        return DecodingCheck(batches="its predictions differ by 14%")

    monkeypatch.setattr(engine_probe, "SECONDS", 600.0)
    monkeypatch.setattr(engine_probe, "check_decoding", check)
    at_once(engine_probe.probe_model(settings, loaded, said.append))
    return said


Command = Callable[..., Any]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``start-llm models WORDS``, where no server answers; gives what it said."""
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("START_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLX_PORT", "1")
    monkeypatch.setenv("COLUMNS", "500")

    def run(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main(["models", *words]) == code
        return capsys.readouterr()

    return run


def test_a_models_facts_and_who_says_so(models: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_caller(tmp_path, "GLM-4.7", "hermes")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": "20"}')
    monkeypatch.setenv("ORACLE_REPLIES", str(tmp_path / "reply"))
    (tmp_path / "reply").write_text(CALLERS[2].reply())

    before = models("show", str(model), "--all").out
    assert "found out when it is served for the first time" in before and "tool_parser" not in before

    serve_once(load_settings(None, model_path=str(model), trust_remote_code=True, model_probe="on"), monkeypatch)
    shown = models("show", str(model), "--all").out
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[1:] if line.strip()}
    assert lines["tool_parser"] == ["glm47", "probe"]
    assert lines["family"] == ["glm4", "config"] and lines["context"] == ["262,144", "config"]
    assert lines["sampling.temperature"] == ["0.6", "makers"]
    assert lines["sampling.top_p"] == ["0.9", "built-in"] and lines["sampling.top_k"] == ["40", "built-in"]
    assert "generation_config.json: top_k='20' is passed over" in shown
    assert lines["template.tools"] == ["yes", "probe"]
    assert "wrote glm47" in " ".join(lines["Asked"])
    assert lines["batches"] == ["no", "probe"] and lines["kv_reuse"] == ["yes", "probe"]
    assert "Requests are decoded one by one, not in batches: its predictions differ by 14%." in shown

    summary = dict(line.split(None, 1) for line in models("show", str(model)).out.splitlines()[1:])
    assert summary["tools"] == "glm47 (by probe)" and summary["context"] == "262,144 tokens (by config)"
    assert summary["sampling"].startswith("temperature 0.6, top_p 0.9, top_k 40")
    assert "template.tools" not in summary and len(summary) < 12

    own = tmp_path / "home" / "models"
    own.mkdir(parents=True)
    (own / "GLM-4.7.toml").write_text('tool_parser = "mistral"\n[sampling]\ntop_k = 5\n')
    monkeypatch.setenv("DEFAULT_TEMPERATURE", "0.1")
    data = json.loads(models("show", str(model), "--json").out)
    assert data["facts"]["tool_parser"] == {"value": "mistral", "source": "file"}
    assert data["facts"]["sampling.top_k"] == {"value": 5, "source": "file"}
    assert data["facts"]["sampling.temperature"] == {"value": 0.1, "source": "setting"}
    assert data["file"] == str(own / "GLM-4.7.toml") and data["trial"]["format"] == "glm47"

    (own / "GLM-4.7.toml").write_text('tool_praser = "mistral"\n')
    assert "the nearest one is 'tool_parser'" in models("show", str(model), code=1).err


def test_a_model_that_shows_no_sign_of_reasoning_is_not_said_to_reason(tmp_path: Path) -> None:
    """What its answers are read for is told in words."""
    facts = {"kind": Fact("text", "config"), "family": Fact("qwen3", "config"), "context": Fact(32_768, "config")}
    facts |= WritingHints().facts(families()["qwen3"])
    summary = dict(show._summary(facts, tmp_path))
    assert summary["kind"] == "text, family qwen3 (Qwen 2.5 to 3.8, and QwQ), 0 B"
    style = output_style(tool_parser="hermes_json", reasoning_parser=facts["reasoning_parser"].value).reasoning
    assert summary["reasoning"] == (
        f"no sign of it in the model's files; {style.start} ... {style.end} in an answer is read as reasoning"
    )
    thinks = WritingHints(reasoning="think_tag").facts(families()["qwen3"])
    assert dict(show._summary(facts | thinks, tmp_path))["reasoning"] == "think_tag (by vocabulary)"


def test_a_model_without_a_template_is_told(models: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was served, while it is loaded, and afterwards."""
    model = build_caller(tmp_path, "GLM-4.7", "hermes")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("ORACLE_REPLIES", str(tmp_path / "reply"))
    (tmp_path / "reply").write_text("No.")
    assert "The model brings no chat template; plain ChatML is used" in models("show", str(model)).out
    said = serve_once(load_settings(None, model_path=str(model), trust_remote_code=True, model_probe="on"), monkeypatch)
    assert any(line.startswith("template  the model brings no chat template") for line in said)
    assert models("show", str(model), "--all").out.count("plain ChatML") == 2  # a fact and a sentence


def test_a_model_that_is_not_here(models: Command, tmp_path: Path) -> None:
    assert "nobody/nothing-7b is not on this disk" in models("show", "nobody/nothing-7b", code=1).err
    (tmp_path / "cache" / "models" / "oracle-hybrid").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "oracle-hybrid" / "config.json").write_text("{}", "utf-8")
    for words in (["show", "oracle-hybird"], ["set", "oracle-hybird", "ttl=600"]):
        assert models(*words, code=1).err.endswith("Did you mean oracle-hybrid?\n")


def test_values_are_set_and_a_name_that_is_missing_is_said(
    models: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(build_caller(tmp_path, "GLM-4.7", "hermes"))
    for words in ([], ["context=32k"]):
        said = models("set", *words, code=2).err
        assert said == f"models set: NAME is missing: start-llm models set NAME {words[0] if words else 'KEY=VALUE'}\n"
    out, err = models("set", model, "context=32k", "ttl=600", "thinking=off", "temperature=0.6")
    assert out == "context = 32768\nttl = 600\nthinking = false\n\n[sampling]\ntemperature = 0.6\n"
    assert models("set", model, "temperature=.5").out.endswith("temperature = 0.5\n")
    path = tmp_path / "home" / "models" / "GLM-4.7.toml"
    out, err = models("set", model, "temperature=0.6")
    assert path.read_text() == out and err == f"# {path}: counts when GLM-4.7 is loaded next\n"
    card = {"id": "GLM-4.7", "details": {"state": "ready", "source": model}}
    monkeypatch.setattr("start_llm.cli.show.server_cards", lambda _: [card])
    out, err = models("set", model, "ttl=")
    assert "ttl" not in out and err.endswith(f"; `start-llm models unload {model} --port 1` takes it out of memory\n")


def test_default_is_the_main_model(models: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So requests name it, and so does the page."""
    model = build_caller(tmp_path, "GLM-4.7", "hermes")
    monkeypatch.setenv("MODEL_PATH", str(model))
    assert models("show", "default").out.startswith(str(model))


def test_models_are_listed_with_their_adapters(models: Command, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    base = build_base(cache / "models" / "tiny-base")
    for name in ("titles", "broken", "lost"):
        build_adapter(cache / "adapters" / name, base)
    (cache / "adapters" / "broken" / "adapter_config.json").write_text("{")
    change(cache / "adapters" / "lost", model="somebody/else-7b")
    lines = models().out.splitlines()
    assert any(line.startswith("tiny-base+titles ") for line in lines)
    assert any("+broken" in line and "cannot be read" in line for line in lines)
    assert any("+lost" in line and "somebody/else-7b" in line for line in lines)
    listed = {model["name"]: model["adapters"] for model in json.loads(models("--json").out)}
    assert listed["tiny-base"] == ["titles"]


def test_a_head_that_drafts_is_told(models: Command, tmp_path: Path) -> None:
    assert "drafts by    its own MTP head" in models("show", str(write_checkpoint(tmp_path / "headed"))).out
    lines = [line.split() for line in models("show", str(tmp_path / "headed"), "--all").out.splitlines()]
    assert ["drafts_by", "its", "own", "MTP", "head", "weights"] in lines


def test_a_head_that_is_published_is_told(models: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = write_checkpoint(tmp_path / "Qwen3.6-27B-4bit", with_head=False)
    told = models("show", str(model)).out
    assert "drafts by" not in told
    assert "A head that drafts for it is published: start-llm pull mlx-community/Qwen3.6-27B-MTP-4bit" in told
