"""LoRA adapters: what is wrong with one is said; a model with one answers as the fused checkpoint does."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import load as mlx_load
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save

from start_llm.core.errors import NotFound, NotSupported, StartLLMError
from start_llm.core.settings import load_settings
from start_llm.models.device import GIB, Device
from start_llm.models.loader import LoadedModel, load_model
from tests.integration.live import Live, live
from tests.memory_folder import memory_folder
from tests.oracle import build_oracle

MACHINE = Device("Linux", "some CPU", 32 * GIB, "cpu", 24 * GIB)
LORA = {"rank": 4, "scale": 8.0, "dropout": 0.1}
LAYERS = 2


def build_base(folder: Path, width: int = 32) -> Path:
    """A random llama with the oracle's tokenizer."""
    build_oracle(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_unflatten([(name, 4 * array) for name, array in tree_flatten(model.parameters())]))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def build_adapter(folder: Path, base: Path, *, seed: int = 1, kind: str = "lora", layers: int = LAYERS) -> Path:
    """As `mlx_lm.lora` writes one; its weights are random."""
    folder.mkdir(parents=True)
    model: Any = mlx_load(str(base))[0]
    model.freeze()
    linear_to_lora_layers(model, layers, dict(LORA), use_dora=kind == "dora")
    mx.random.seed(seed)
    trained = {
        name: mx.random.normal(array.shape) * 0.3 if name.endswith("lora_b") else array
        for name, array in tree_flatten(model.trainable_parameters())
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)
    config = {"fine_tune_type": kind, "model": str(base), "num_layers": layers, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def fuse(into: Path, base: Path, adapter: Path) -> Path:
    """What `mlx_lm.fuse` writes."""
    model, tokenizer, config = mlx_load(str(base), adapter_path=str(adapter), return_config=True)  # type: ignore[misc]
    fused = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    save(into, str(base), model, tokenizer, config, donate_model=False)
    return into


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapter(tmp_path_factory.mktemp("adapters") / "one", base)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def loaded(base: Path, adapter: Path | None, said: list[str] | None = None) -> LoadedModel:
    settings = load_settings(None, model_path=str(base), adapter_path=None if adapter is None else str(adapter))
    return load_model(settings, MACHINE, lambda step, part: None, (said if said is not None else []).append)


def greedy(model: Any, prompt: Sequence[int], count: int = 16) -> list[int]:
    """The likeliest tokens, each by a pass over all that is before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_it_answers_as_the_fused_checkpoint_does(base: Path, tmp_path: Path, kind: str) -> None:
    made = build_adapter(tmp_path / "adapter", base, kind=kind)
    said: list[str] = []
    adapted, bare = loaded(base, made, said), loaded(base, None)
    fused = loaded(fuse(tmp_path / "fused", base, made), None)
    assert said == [f"adapter   adapter  ({kind}, rank 4)"]
    prompts = [[5, 9, 200], [77, 1000, 8, 8], list(range(40, 60))]
    answers = [greedy(adapted.model, prompt) for prompt in prompts]
    assert answers == [greedy(fused.model, prompt) for prompt in prompts]
    assert answers != [greedy(bare.model, prompt) for prompt in prompts]


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


def change(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def weights(folder: Path, change: Any) -> None:
    path = folder / "adapters.safetensors"
    mx.save_safetensors(str(path), change(mx.load(str(path))))


FAULTS: list[tuple[str, Any, str]] = [
    ("no config", lambda f: (f / "adapter_config.json").unlink(), r"there is no adapter_config\.json in that folder"),
    ("broken config", lambda f: (f / "adapter_config.json").write_text("{"), r"cannot be read"),
    ("a list", lambda f: (f / "adapter_config.json").write_text("[]"), r"not a JSON object"),
    ("peft", lambda f: change(f, peft_type="LORA"), r"in the form of PEFT"),
    ("full", lambda f: change(f, fine_tune_type="full"), r"serve it as a model"),
    ("odd kind", lambda f: change(f, fine_tune_type="ia3"), r"must be lora or dora, but is 'ia3'"),
    ("layers", lambda f: change(f, num_layers="all"), r"num_layers must be a whole number, but is 'all'"),
    ("no parameters", lambda f: change(f, lora_parameters=None), r"has no lora_parameters"),
    ("rank 0", lambda f: change(f, lora_parameters=LORA | {"rank": 0}), r"rank must be 1 to 4096, but is 0"),
    ("other rank", lambda f: change(f, lora_parameters=LORA | {"rank": 7}), r"says rank 7, but model.* has the shape"),
    ("alpha", lambda f: change(f, lora_parameters={"rank": 4, "alpha": 16}), r"scale must be .* mlx-lm's is scale"),
    ("dropout", lambda f: change(f, lora_parameters=LORA | {"dropout": 1}), r"dropout must be from 0 to below 1"),
    ("keys", lambda f: change(f, lora_parameters=LORA | {"keys": [1]}), r"keys must be a list of names"),
    ("no weights", lambda f: (f / "adapters.safetensors").unlink(), r"there is no adapters\.safetensors"),
    ("not weights", lambda f: (f / "adapters.safetensors").write_bytes(b"x" * 99), r"no safetensors file"),
    ("no shape", lambda f: header(f, b'{"a": {"data_offsets": [0, 4]}}'), r"no safetensors file"),
    ("a shape of words", lambda f: header(f, b'{"a": {"shape": "x", "data_offsets": [0, 4]}}'), r"no safetensors file"),
    ("no offsets", lambda f: header(f, b'{"a": {"shape": [4], "data_offsets": [0, "x"]}}'), r"no safetensors file"),
    ("too deep", lambda f: header(f, b"[" * 100_000), r"no safetensors file"),
    ("cut", lambda f: cut(f / "adapters.safetensors"), r"cut short \(\d+ of \d+ bytes\)"),
    ("strange", lambda f: weights(f, lambda w: w | {"model.layers.9.x.lora_a": mx.zeros((4, 4))}), r"1 of its weights"),
    ("missing", lambda f: weights(f, lambda w: dict(list(w.items())[2:])), r"not complete .* 2 weights are missing"),
]


def header(folder: Path, text: bytes) -> None:
    (folder / "adapters.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(("spoil", "said"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_every_fault_has_a_sentence(base: Path, adapter: Path, tmp_path: Path, spoil: Any, said: str) -> None:
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    spoil(broken)
    with pytest.raises(NotSupported, match=said):
        loaded(base, broken)


def test_no_folder_and_another_shape(adapter: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"ADAPTER_PATH=/nothing: there is no such folder"):
        loaded(base, Path("/nothing"))
    wider = build_base(tmp_path / "wider", width=48)
    with pytest.raises(StartLLMError, match=r"does not fit .* has the shape \(.*\), where \(.*\) is needed"):
        loaded(wider, adapter)


def test_a_server_with_an_adapter_answers_as_one_with_the_fused_model(
    base: Path, adapter: Path, tmp_path: Path, memory_path: Path
) -> None:
    """The same cache folder for all: what one stored on disk is never another's, and each reuses its own."""
    fused, cache = fuse(tmp_path / "fused", base, adapter), memory_path / "cache"
    asked = [{"role": "user", "content": "what is new " * 700}]

    def answer(server: Live) -> dict[str, Any]:
        return server.chat(asked, max_tokens=24, temperature=0, logit_bias={"3": -100})

    def texts(model: Path, **settings: Any) -> tuple[str, int, int]:
        with live(model, cache, kv_disk_dir="auto", model_probe="off", **settings) as server:
            first, second = answer(server), answer(server)
            assert first["message"]["content"] == second["message"]["content"]
            return first["message"]["content"], first["report"]["reused"], second["report"]["reused"]

    bare, adapted = texts(base), texts(base, adapter_path=str(adapter))
    assert adapted[0] == texts(fused)[0] != bare[0]
    assert (bare[1], adapted[1]) == (0, 0)
    assert bare[2] > 50
    assert adapted[2] > 50
    again = texts(base, adapter_path=str(adapter))
    assert again[0] == adapted[0]
    assert again[1] > 50
