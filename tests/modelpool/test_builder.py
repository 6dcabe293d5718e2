"""A load that comes to nothing leaves nothing behind: no thread, no lock on the KV's folder, no place in memory."""

from __future__ import annotations

import re
import shutil
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotSupported, Unavailable
from start_llm.core.settings import load_settings
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import TextRuntime, end_streams
from start_llm.host.home import COMMAND_VARIABLE
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.models.background import at_once
from start_llm.models.checkpoint import safetensors_header
from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES
from start_llm.models.fingerprint import fingerprint
from start_llm.models.loader import Found, LoadedModel, check_small_model, load_steps
from start_llm.models.room import Weights
from tests.engine.headed import write_checkpoint
from tests.oracle import build_oracle
from tests.together import together
from tests.waiting import until

pytestmark = pytest.mark.thorough


class SideModel:
    nbytes = 1000


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What MLX makes and clears belongs to a thread: not to the one that runs the tests."""

    def run() -> Any:
        try:
            return work()
        finally:
            end_streams()

    return together([run])[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_oracle(tmp_path_factory.mktemp("building") / "oracle")


@pytest.fixture
def builder(model: Path, tmp_path: Path) -> ModelBuilder:
    settings = load_settings(
        None, model_path=str(model), trust_remote_code=True, start_llm_cache_dir=tmp_path, kv_disk_dir="auto"
    )
    made = ModelBuilder(settings, lambda need: False, lambda line: None, lambda step, part: None)
    made.begin(0)
    return made


def disk_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-disk"}


def first_steps(builder: ModelBuilder) -> Generator[float, None, TextRuntime]:
    return builder.first_steps(builder._settings)


def loads_and_closes(builder: ModelBuilder) -> str:
    """Where its KV is written to."""

    def work() -> str:
        at_once(first_steps(builder)).close()
        return builder.stored_where

    return str(on_a_thread(work))


def leaves_nothing(builder: ModelBuilder, before: set[threading.Thread]) -> None:
    # One that is closed may be at its last task.
    until(lambda: disk_threads() <= before, "the thread of its KV's folder is left")
    shared = builder.shared
    assert not shared.guards and shared._weights == {}
    assert "GB in" in loads_and_closes(builder), "the folder of its KV is still taken"


@pytest.mark.parametrize("little", [0, 1 << 30])  # all bytes are read in the background, or at once
def test_kv_on_disk_is_of_every_byte_of_the_weights(
    builder: ModelBuilder, model: Path, tmp_path: Path, little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies differ in a value that the samples do not show, as they do not show all of larger tensors."""
    for name, value in {"LITTLE_BYTES": little, "_ENDS_BYTES": 4, "_TENSOR_BYTES": 4}.items():
        monkeypatch.setattr(f"start_llm.models.fingerprint.{name}", value)
    mended = Path(shutil.copytree(model, tmp_path / "mended"))
    file = next(mended.glob("*.safetensors"))
    header = safetensors_header(file)
    assert header is not None
    largest = max(header.tensors.values(), key=lambda tensor: tensor.end - tensor.begin)
    place = header.length + (largest.begin + largest.end) // 2 // 4 * 4
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert fingerprint(model) == fingerprint(mended)

    def folders() -> int:
        return sum(path.is_dir() for path in (tmp_path / "kv").glob("*"))

    def load(folder: Path, count: int) -> None:
        settings = builder._settings.model_copy(update={"model_path": str(folder)})
        runtime = at_once(builder.first_steps(settings))
        until(lambda: folders() == count, "it has no folder of its own")
        runtime.close()

    for folder, count in ((model, 1), (mended, 2), (model, 2)):
        on_a_thread(partial(load, folder, count))


@pytest.mark.parametrize("most", [None, 3 << 30])
def test_as_much_kv_goes_to_disk_as_the_settings_say(
    most: int | None, builder: ModelBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.engine.assembly.default_disk_bytes", {tmp_path / "kv": 2 << 30}.__getitem__)
    settings = builder._settings.model_copy(update={"kv_disk_bytes": most})

    def load() -> float:
        runtime = at_once(builder.first_steps(settings))
        figures = runtime.store.figures()
        runtime.close()
        return figures["kv_disk_budget_bytes"]

    assert on_a_thread(load) == (most or 2 << 30)
    assert builder.stored_where == f"{3.2 if most else 2.1} GB in {tmp_path / 'kv'}"


def test_a_model_whose_vision_part_cannot_be_loaded_reads_text(
    builder: ModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(builder, "_say", said.append)

    def steps(found: Found, *given: Any) -> Generator[float, None, LoadedModel]:
        if found.sees:
            raise NotSupported("mlx-vlm has no such model.")
        return (yield from load_steps(found, *given))

    monkeypatch.setattr("start_llm.engine.assembly.load_steps", steps)

    def load() -> bool:
        found = replace(builder.read(builder._settings), sees=True)
        runtime = at_once(builder.steps(builder._settings, found, "", Weights()))
        sees = runtime.loaded.vision is not None
        runtime.close()
        return sees

    assert on_a_thread(load) is False
    assert "vision    off: mlx-vlm has no such model; the model reads text only" in said


@pytest.mark.parametrize("where", ["make_store", "MemoryGuard", "TextRuntime", "limit_context"])
def test_what_fails_at_the_end_of_a_load(where: str, builder: ModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = disk_threads()
    with monkeypatch.context() as patch:
        patch.setattr(f"start_llm.engine.assembly.{where}", Mock(side_effect=RuntimeError("a fault")))
        with pytest.raises(RuntimeError, match="a fault"):
            on_a_thread(lambda: at_once(first_steps(builder)))
    leaves_nothing(builder, before)


def test_a_load_that_is_given_up_when_its_disk_tier_is_open(builder: ModelBuilder) -> None:
    before = disk_threads()

    def steps() -> None:
        made = builder.first_steps(builder._settings, "one")
        while disk_threads() <= before:
            next(made)
        made.close()

    on_a_thread(steps)
    leaves_nothing(builder, before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_model_that_fails_or_leaves_gives_its_memory_back(fails: bool, builder: ModelBuilder) -> None:
    def loading() -> Generator[float, None, Any]:
        yield 0.0
        if fails:
            raise RuntimeError("no memory")
        return SideModel()

    def work() -> int:
        try:
            model = weakref.ref(at_once(builder.side_steps("side", Weights(900), loading())))
            assert builder.shared.weight_bytes == 1000 and model() is not None
            at_once(builder.side_unloading("side"))
            assert model() is None
        except RuntimeError:
            assert fails
        return builder.shared.weight_bytes

    assert on_a_thread(work) == 0


def test_a_side_model_waits_for_no_other_rank(builder: ModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks connect once, for the model that they compute together."""

    def loading() -> Generator[float, None, Any]:
        yield 0.0
        return SideModel()

    monkeypatch.setattr(builder.ranks, "connect", Mock(side_effect=RuntimeError("nobody is there")))
    assert on_a_thread(lambda: at_once(builder.side_steps("side", Weights(900), loading()))).nbytes == 1000


def test_a_rank_with_other_files_of_the_model_is_refused(
    builder: ModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "alone", False)
    monkeypatch.setattr(builder.ranks, "agree", lambda value: "what the first host has")
    with pytest.raises(Unavailable, match="other ones here than on the first host"):
        on_a_thread(lambda: at_once(first_steps(builder)))


def test_an_unload_that_is_given_up_frees_all_the_same(builder: ModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        runtime = at_once(first_steps(builder))
        monkeypatch.setattr(runtime.store.unguarded.disk, "written", lambda: False)
        unloading = TextRuntime.unloading(runtime)
        next(unloading)
        unloading.close()

    before = disk_threads()
    on_a_thread(work)
    leaves_nothing(builder, before)


# --- what drafts for a model ------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("headed") / "model")


def load(model: Path, cache: Path, look: Callable[[TextRuntime], Any], **more: Any) -> tuple[Any, list[str]]:
    """What `look` sees of the loaded model, and the lines that people are told."""
    settings = load_settings(None, model_path=str(model), start_llm_cache_dir=cache, trust_remote_code=True, **more)
    lines: list[str] = []
    builder = ModelBuilder(settings, lambda need: False, lines.append, lambda step, part: None)
    builder.begin(0)

    def work() -> Any:
        runtime = at_once(builder.first_steps(settings))
        try:
            return look(runtime)
        finally:
            runtime.close()

    return on_a_thread(work), [line for line in lines if line.startswith("drafts ")]


def about(runtime: TextRuntime) -> tuple[bool, bool, str, int]:
    headed = isinstance(runtime.loaded.model, HeadedModel)
    gated = runtime.drafts is not None and runtime.drafts.gate.head is not None
    return headed, gated, runtime.loaded.fingerprint, runtime.loaded.weight_bytes


def test_a_head_in_the_checkpoint_is_used_and_its_kv_is_of_its_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head has entries of its own in a row: KV without them is no KV of that model, on disk either."""
    tier, found = Mock(side_effect=DiskTier), list[Any]()
    monkeypatch.setattr("start_llm.engine.assembly.DiskTier", tier)
    for choice, said in ({}, ["drafts    its own MTP head drafts for model"]), ({"draft_model": "off"}, []):
        seen, lines = load(checkpoint, tmp_path, about, kv_disk_dir="auto", **choice)
        assert seen[:2] == (not choice, not choice) and lines == said
        assert tier.call_args.args[1].startswith(f"{seen[2]} ")
        found.append(seen)
    assert found[0][2] != found[1][2] and found[0][3] > found[1][3]


def test_a_small_model_drafts_where_its_vocabulary_fits(checkpoint: Path, tmp_path: Path) -> None:
    oracle = build_oracle(tmp_path / "oracle")
    found, lines = load(oracle, tmp_path, about, draft_model=str(checkpoint))
    assert found[:2] == (False, False)
    assert len(lines) == 1 and "does not draft for oracle: it cannot be used: " in lines[0]
    found, lines = load(oracle, tmp_path, about, draft_model=str(build_oracle(tmp_path / "small")))
    assert lines == [f"drafts    the small model {tmp_path / 'small'} drafts for oracle"]
    assert found[:2] == (True, True)


def test_a_drafter_larger_than_what_is_free_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    oracle = build_oracle(tmp_path / "oracle")
    small = build_oracle(tmp_path / "small")
    weights = (small / "model.safetensors").stat().st_size
    needed = PREFILL_BYTES + LEAST_CACHE_BYTES + 2 * weights
    more = {"draft_model": str(small), "pool_memory_bytes": needed}
    assert load(oracle, tmp_path, about, **more)[0][:2] == (True, True)
    found, lines = load(oracle, tmp_path, about, **more | {"pool_memory_bytes": needed - weights})
    assert found[:2] == (False, False)
    sizes = r"its weights take [\d.]+ .?B, and [\d.]+ .?B are free beside the model and the least that a prefill"
    why = rf"drafts    the small model \S+ does not draft for oracle: {sizes} and KV need"
    assert len(lines) == 1 and re.fullmatch(why, lines[0])


@pytest.mark.parametrize("kind", ['"gemma4_assistant"', '["a list"]', "null"])
def test_a_head_of_another_family_drafts_not_and_the_model_is_served(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(f'{{"model_type": {kind}}}')
    (head / "model.safetensors").write_bytes(b"")
    found, lines = load(checkpoint, tmp_path, about, draft_model=str(head))
    assert found[:2] == (False, False)
    why = "neither mlx-lm nor mlx-vlm has a text model of its type; see docs/drafts.md"
    assert lines == [f"drafts    the small model {head} does not draft for model: {why}"]


def test_a_small_model_whose_tokenizer_is_broken_drafts_not(tmp_path: Path) -> None:
    small = build_oracle(tmp_path / "small")
    for text in ("{}", "[]", "{broken", '{"version": "1.0", "model": {"type": "nope"}}'):
        (small / "tokenizer.json").write_text(text, "utf-8")
        with pytest.raises(NotSupported, match="its tokenizer cannot be read"):
            check_small_model(small, None)


def test_a_published_head_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "python3.12 install_and_run.py")
    model = write_checkpoint(tmp_path / "Qwen3.5-4B-MLX-8bit", with_head=False)
    found, lines = load(model, tmp_path, about)
    assert found[:2] == (False, False)
    pull = "python3.12 install_and_run.py pull mlx-community/Qwen3.5-4B-MTP-4bit"
    assert lines == [f"drafts    a head that drafts for Qwen3.5-4B-MLX-8bit is published: {pull}"]
