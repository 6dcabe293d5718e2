"""What a model can do is found out once, by rendering and by asking it; its own file has the last word."""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings, load_settings
from start_llm.engine.checks import TooSlow, greedy
from start_llm.engine.probe import limit_context, probe_model
from start_llm.models import loader, probe_table
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck, Fact
from start_llm.models.loader import LoadedModel
from start_llm.models.probe_table import PROBES, decode, encode, probe_key, read_probe
from start_llm.models.tool_probe import SECONDS, TOKENS
from tests.kinds import some
from tests.models.callers import CALLERS, Caller, build_caller
from tests.models.loading import load_model


class World:
    """One cache folder; counts what is said and how often a model was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.asked = 0
        self.checked = 0
        self.finds: DecodingCheck | None = None
        self._reply = folder / "reply"
        monkeypatch.setenv("ORACLE_REPLIES", str(self._reply))
        monkeypatch.setattr(loader, "FOLDER", folder / "models")
        monkeypatch.setattr("start_llm.engine.probe.SECONDS", 600.0)
        monkeypatch.setattr("start_llm.engine.probe.greedy", self._answer)
        monkeypatch.setattr("start_llm.engine.probe.check_decoding", self.check)

    def _answer(self, *args: Any, **more: Any) -> Any:
        self.asked += 1
        return greedy(*args, **more)

    def settings(self, model: Path, **more: Any) -> Settings:
        fixed = {"trust_remote_code": True, "start_llm_cache_dir": self.folder / "cache", "model_probe": "on"}
        return load_settings(None, model_path=str(model), **fixed | more)

    def load(self, model: Path, reply: str = "", **more: Any) -> LoadedModel:
        settings = self.settings(model, **more)
        self._reply.write_text(reply, "utf-8")
        loaded = load_model(settings, self.said.append)
        return at_once(probe_model(settings, loaded, self.said.append))

    def check(self, *args: Any) -> Generator[float, None, DecodingCheck | None]:
        self.checked += 1
        yield from ()
        return self.finds

    def own_file(self, name: str, text: str) -> None:
        folder = self.folder / "models"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.toml").write_text(text, "utf-8")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize("caller", some(CALLERS, 7), ids=lambda caller: f"{caller.name}-{caller.call}")
def test_the_format_that_a_model_writes_is_the_one_that_is_used(caller: Caller, world: World) -> None:
    able = world.load(build_caller(world.folder, caller.name, caller.call), caller.reply()).capabilities
    assert able.facts["family"].value == caller.family
    assert world.asked == 1
    if caller.format is None:
        assert able.facts["tool_parser"] == Fact("json_tools", "template"), "what has no mark is read by every parser"
        assert "without any mark" in world.said[0]
    else:
        assert able.facts["tool_parser"] == Fact(caller.format, "probe")
        assert able.tool_parser == caller.format and f"wrote {caller.format}" in world.said[0]
    assert able.traits is not None and able.traits.tools and able.traits.fingerprint


def test_harmony_brings_its_reasoning_style_along(world: World) -> None:
    harmony = next(caller for caller in CALLERS if caller.family == "gpt-oss")
    able = world.load(build_caller(world.folder, "Some-Model", "hermes"), harmony.reply()).capabilities
    assert (able.tool_parser, able.reasoning_parser) == ("harmony", "harmony")


@pytest.mark.parametrize("babble", ["It is sunny in Paris. ", "<tool_call> get weather! "])
def test_a_model_that_babbles_keeps_what_its_template_says(babble: str, world: World) -> None:
    loaded = world.load(build_caller(world.folder, "Qwen3-8B", "xml"), babble * 500)
    assert loaded.capabilities.facts["tool_parser"] == Fact("qwen3_coder", "template")
    assert f"wrote no call ({TOKENS} tokens" in world.said[0] and "will be read as qwen3_coder" in world.said[0]


def test_a_call_behind_thoughts_counts(world: World) -> None:
    caller = CALLERS[1]
    reply = "<think>\nI could say <tool_call>{} here.\n</think>\n\nI look.\n" + caller.reply()
    able = world.load(build_caller(world.folder, caller.name, caller.call), reply).capabilities
    assert able.facts["tool_parser"] == Fact("qwen3_coder", "probe")


def test_the_second_start_asks_nothing(world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    first = world.load(path, CALLERS[2].reply())
    second = world.load(path, "something else")
    assert world.asked == 1 and len([line for line in world.said if line.startswith("probe ")]) == 1
    assert second.capabilities == first.capabilities
    probed = read_probe(world.folder / "cache" / PROBES, probe_key(first.files))
    assert probed is not None and decode(encode(probed)) == probed


def test_another_template_or_version_is_another_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    files = world.load(path, CALLERS[2].reply()).files
    build_caller(world.folder, "GLM-4.7", "hermes")
    assert world.load(path, CALLERS[0].reply()).capabilities.tool_parser in {"json_tools", "hermes_json"}
    assert world.asked == 2
    before = probe_key(files)
    monkeypatch.setattr("start_llm.models.probe_table.PROBE_VERSION", 1_000_000)
    assert probe_key(files) != before


def test_a_damaged_file_is_written_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    before = world.load(path, CALLERS[2].reply()).capabilities.facts
    for file in (world.folder / "cache" / PROBES).glob("*.json"):
        file.write_bytes(b"\xffthis is no JSON")
    assert world.load(path, CALLERS[2].reply()).capabilities.facts == before and world.asked == 2
    assert "cannot be read" in caplog.text
    assert world.load(path).capabilities.facts == before and world.asked == 2


def test_the_newest_files_stay_and_one_that_another_server_removes_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe_table, "_MOST_FILES", 2)
    monkeypatch.setattr(probe_table, "encode", lambda result: "{}")
    for age, name in enumerate("abcd"):
        probe_table.keep_probe(tmp_path, name, Mock())
        os.utime(tmp_path / f"{name}.json", (age, age))
    probe_table.keep_probe(tmp_path, "e", Mock())
    assert {path.stem for path in tmp_path.iterdir()} == {"d", "e"}
    (tmp_path / "gone.json").symlink_to("nowhere")
    probe_table.keep_probe(tmp_path, "f", Mock())
    assert (tmp_path / "f.json").exists() and not caplog.records


def test_a_model_that_was_not_asked_is_asked_later(world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "hermes")
    settings = world.settings(path, model_probe="off")
    loaded = load_model(settings, world.said.append)
    able = at_once(probe_model(settings, loaded, world.said.append, alone=False)).capabilities
    assert able.facts["tool_parser"].source == "template" and able.traits is not None and world.said == []
    assert world.load(path, CALLERS[2].reply()).capabilities.tool_parser == "glm47"


def test_how_it_decodes_is_checked_once_and_told_at_each_load(world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "hermes")
    world.finds = DecodingCheck(batches="the words differ")
    for _ in range(2):
        world.said.clear()
        assert world.load(path, CALLERS[2].reply()).capabilities.decoding == world.finds and world.checked == 1
        assert any(line.endswith("not in batches: the words differ") for line in world.said)


def test_a_slow_machine_gives_up_early_and_tries_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_caller(world.folder, "GLM-4.7", "hermes")
    settings = world.settings(path)
    loaded = load_model(settings, world.said.append)
    times = iter(range(0, 100_000, 1000))  # each look at the clock is 1,000 s later
    slow = partial(greedy, loaded.model, eos=loaded.eos, most=9, seconds=SECONDS, clock=lambda: float(next(times)))
    with pytest.raises(TooSlow):
        list(slow(range(5, 300)))
    with monkeypatch.context() as patch:
        patch.setattr("start_llm.engine.probe.greedy", lambda model, tokens, **more: slow(tokens))
        able = at_once(probe_model(settings, loaded, world.said.append, alone=False)).capabilities
    assert able.facts["tool_parser"].source == "template"
    assert "too long here" in world.said[0]
    assert world.load(path, CALLERS[2].reply()).capabilities.facts["tool_parser"] == Fact("glm47", "probe")


def test_a_template_without_tools_is_not_asked(world: World) -> None:
    path = build_caller(world.folder, "Some-Model", "hermes")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (path / "chat_template.jinja").write_text(plain)
    loaded = world.load(path, CALLERS[0].reply())
    assert world.asked == 0 and "its template shows no tools" in world.said[0]
    assert loaded.capabilities.facts["template.tools"] == Fact(False, "probe")


# --- the model's own file ------------------------------------------------------


def test_a_models_own_file_has_the_last_word(world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    before = world.load(path, CALLERS[2].reply()).capabilities
    world.own_file(
        "GLM-4.7",
        'tool_parser = "mistral"\ncontext = 5000\nfamily = "kimi"\n'
        '[template]\nmany_calls = false\nswitches = ["thinking"]\nreasoning_key = ""\n',
    )
    able = world.load(path).capabilities
    assert world.asked == 1, "what was found is still known"
    assert (able.tool_parser, able.context, able.facts["family"].value) == ("mistral", 5000, "kimi")
    assert able.traits is not None and before.traits is not None
    assert (able.traits.many_calls, able.traits.switches, able.traits.reasoning_key) == (False, ("thinking",), None)
    assert able.traits.fingerprint != before.traits.fingerprint, "what was rendered otherwise is another conversation"
    for name in ("tool_parser", "context", "family", "template.many_calls", "template.switches"):
        assert able.facts[name].source == "file"
    assert able.facts["template.system"].source == "probe"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('tool_praser = "mistral"', "'tool_praser' is no key; the nearest one is 'tool_parser'"),
        ('tool_parser = "mistrall"', "tool_parser='mistrall' is not known; the nearest one is 'mistral'"),
        ("tool_parser = 3", "tool_parser=3 is not known"),
        ('family = "qwen"', "family='qwen' is not known; the nearest one is 'qwen3'"),
        ('context = "much"', "context='much' must be a number of tokens, at least 256"),
        ("context = true", "context=True must be a number"),
        ("template = 1", "must be a table: [template]"),
        ("[template]\nmanycalls = true", "template.manycalls is no key; the nearest one is 'many_calls'"),
        ('[template]\ntools = "yes"', "template.tools='yes' must be true or false"),
        ('[template]\ncalls = "json"', 'template.calls=\'json\' must be "mapping", "string" or ""'),
        ("[template]\ndates = 4", "template.dates=4 must be a list of texts"),
        ("sampling = 1", "must be a table: [sampling]"),
        ("[sampling]\ntemprature = 1", "sampling.temprature is no key; the nearest one is 'temperature'"),
        ("[sampling]\ntemperature = 3", "sampling.temperature=3 must be a number from 0 to 2"),
        ("[sampling]\ntop_k = 2.5", "sampling.top_k=2.5 must be a whole number from 0 to 1,000,000"),
        ("context = ", "is no TOML"),
    ],
)
def test_a_bad_file_is_told_before_the_weights_are_read(text: str, says: str, world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    (path / "model.safetensors").unlink()
    world.own_file("GLM-4.7", text)
    with pytest.raises(NotSupported) as caught:
        world.load(path)
    assert says in caught.value.message and "GLM-4.7.toml" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_setting_chooses_the_family_and_an_unknown_one_is_told_with_the_nearest(world: World) -> None:
    path = build_caller(world.folder, "GLM-4.7", "keyed")
    assert world.load(path, model_family="kimi").capabilities.facts["family"] == Fact("kimi", "setting")
    with pytest.raises(NotSupported, match=r"MODEL_FAMILY=lama: there is no such family; the nearest one is 'llama'"):
        world.load(path, model_family="lama")


# --- context -------------------------------------------------------------------


def test_the_context_is_what_memory_has_room_for(world: World) -> None:
    loaded = world.load(build_caller(world.folder, "GLM-4.7", "keyed"), CALLERS[2].reply())
    world.said.clear()
    assert limit_context(loaded, None, world.said.append) is loaded
    assert limit_context(loaded, 10**9, world.said.append) is loaded and world.said == []
    tight = limit_context(loaded, 40_000, world.said.append).capabilities
    assert tight.context == 39 * 1024 and tight.facts["context"] == Fact(39 * 1024, "memory")
    assert world.said == ["context   39,936 tokens of KV fit into memory; GLM-4.7 could take 262,144"]
