"""LoRA adapters: what is wrong with one is said; a model with one answers as the fused checkpoint does."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import BadRequest, NotFound, Unavailable
from start_llm.core.settings import load_settings
from start_llm.models.adapter import read_adapter
from start_llm.models.background import at_once
from start_llm.models.loader import BasesInMemory, LoadedModel, find_model, load_steps
from start_llm.models.room import Weights, group_of, together
from tests.models.architectures import greedy
from tests.models.loading import MACHINE, load_model, quiet
from tests.models.lora import FAULTS, LORA, build_adapter, build_base, change, fuse, quantise


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapter(tmp_path_factory.mktemp("adapters") / "one", base)


def loaded(
    base: Path, adapter: Path | None, said: list[str] | None = None, bases: BasesInMemory | None = None
) -> LoadedModel:
    settings = load_settings(None, model_path=str(base), adapter_path=None if adapter is None else str(adapter))
    return load_model(settings, quiet if said is None else said.append, bases=bases)


@pytest.mark.parametrize("file", ["base/model.safetensors", "one/adapters.safetensors"])
def test_files_that_change_while_they_are_read_are_refused(
    base: Path, adapter: Path, tmp_path: Path, file: str
) -> None:
    """What was read may be neither the old ones nor the new ones, and its KV would be kept as that of either."""
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(adapter, tmp_path / "one")
    settings = load_settings(None, model_path=str(tmp_path / "base"))
    found = find_model(settings, MACHINE, quiet, quiet, adapter=read_adapter(tmp_path / "one", "The adapter"))
    parts: list[float] = []
    steps = load_steps(found, lambda step, part: parts.append(part), quiet, BasesInMemory())
    next(steps)
    os.utime(tmp_path / file, ns=(1, 1))
    with pytest.raises((BadRequest, Unavailable), match=r"changed while .* read; ask again"):
        at_once(steps)
    assert parts[0] == 0.0 and parts[-1] < 0.0, "its bar goes"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_it_answers_as_the_fused_checkpoint_does(base: Path, tmp_path: Path, kind: str) -> None:
    made = build_adapter(tmp_path / "adapter", base, kind=kind)
    said: list[str] = []
    adapted, bare = loaded(base, made, said), loaded(base, None)
    fused = loaded(fuse(tmp_path / "fused", base, made), None)
    assert said == [f"adapter   adapter  ({kind}, rank 4)"]
    prompts = [[5, 9, 200], [77, 1000, 8, 8], list(range(40, 60))]
    answers = [greedy(adapted.model, prompt, 16) for prompt in prompts]
    assert answers == [greedy(fused.model, prompt, 16) for prompt in prompts]
    assert answers != [greedy(bare.model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("quantised", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_adapters_share_the_arrays_of_their_base(base: Path, tmp_path: Path, quantised: bool) -> None:
    """Answers are those of models that were loaded alone, whichever came first and whatever goes."""
    if quantised:
        base = quantise(tmp_path / "tiny-base-8bit", base)
    first, second = (build_adapter(tmp_path / f"a{seed}", base, seed=seed) for seed in (1, 2))
    fused = loaded(fuse(tmp_path / "fused", base, first, dequantise=quantised), None)
    prompt, bases = [5, 9, 200], BasesInMemory()
    alone = {path: greedy(loaded(base, path).model, prompt, 16) for path in (None, first, second)}
    one = loaded(base, first, bases=bases)
    mx.synchronize()
    before = mx.get_active_memory()
    bare, two = loaded(base, None, bases=bases), loaded(base, second, bases=bases)
    mx.synchronize()
    added = mx.get_active_memory() - before
    assert one.base is bare.base is two.base and one.base is not None
    assert bare.weights == Weights(0, group_of(base), bare.weight_bytes) == Weights(0, group_of(base), one.base.nbytes)
    assert two.weights.own == sum(array.nbytes for array in mx.load(str(second / "adapters.safetensors")).values())
    assert two.weights.own <= added < two.weights.own + one.base.nbytes / 8
    assert [greedy(model.model, prompt, 16) for model in (bare, one, two)] == list(alone.values())
    assert alone[first] == greedy(fused.model, prompt, 16)
    kept = one.base
    del one, bare
    assert bases.get(kept.group) is kept and greedy(two.model, prompt, 16) == alone[second]
    again = loaded(base, None, bases=bases)
    assert again.base is kept and greedy(again.model, prompt, 16) == alone[None]
    del two, again, kept
    gc.collect()
    assert bases.get(group_of(base)) is None


def test_weights_in_memory_are_not_those_of_a_file_that_was_written_since(base: Path, tmp_path: Path) -> None:
    """Samples of its bytes cannot tell, and nobody reads all of them first."""
    folder, bases = Path(shutil.copytree(base, tmp_path / "tiny-base")), BasesInMemory()
    old = loaded(folder, None, bases=bases)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes())
    new = loaded(folder, None, bases=bases)
    assert new.base is not old.base and loaded(folder, None, bases=bases).base is new.base
    assert together([old.weights, new.weights]) == old.weight_bytes + new.weight_bytes


def test_kv_is_of_one_adapter_only(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = build_adapter(tmp_path / "other", base, seed=2)
    twin = Path(shutil.copytree(adapter, tmp_path / "twin"))
    scaled = Path(shutil.copytree(adapter, tmp_path / "scaled"))
    change(scaled, lora_parameters={**LORA, "scale": 9.0})
    prints = [loaded(base, each).fingerprint for each in (None, adapter, other, scaled)]
    assert len(set(prints)) == 4
    assert loaded(base, twin).fingerprint == prints[1]


def test_an_adapter_of_another_model_is_served_with_a_warning(base: Path, adapter: Path, tmp_path: Path) -> None:
    renamed = Path(shutil.copytree(base, tmp_path / "Qwen9-8B"))
    said: list[str] = []
    loaded(renamed, adapter, said)
    assert said[0].startswith(f"adapter   one was trained on {base}, and {renamed} is served")


@pytest.mark.parametrize(("spoil", "said"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_every_fault_has_a_sentence(base: Path, adapter: Path, tmp_path: Path, spoil: Any, said: str) -> None:
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    spoil(broken)
    with pytest.raises(BadRequest, match=said):
        loaded(base, broken)


def test_no_folder(base: Path) -> None:
    with pytest.raises(NotFound, match=r"ADAPTER_PATH=/nothing: there is no such folder"):
        loaded(base, Path("/nothing"))
