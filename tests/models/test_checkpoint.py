"""The wrong ones are in `tests/cli/test_wrong_inputs.py`."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import mlx_lm.utils
import pytest

from start_llm.cli import doctor
from start_llm.core.settings import load_settings
from start_llm.models.capabilities import Capabilities, Fact
from start_llm.models.catalog import describe
from start_llm.models.checkpoint import (
    INDEX,
    NGRAMS,
    TEXT_OF_MLX_VLM,
    CheckpointError,
    architectures,
    check_source,
    library_of,
    read_config,
    safetensors_header,
    weights_on_disk,
)
from start_llm.models.family import families
from tests.cli.places import checkpoint, safetensors
from tests.oracle import build_oracle
from tests.vision.oracle import build_vision_oracle


def test_architectures_are_those_that_mlx_lm_loads() -> None:
    known = architectures()
    assert set(mlx_lm.utils.MODEL_REMAPPING) <= known
    assert {"llama", "qwen3", "qwen3_5", "gpt_oss"} <= known and "quasar9" not in known


def test_each_type_has_one_library() -> None:
    """mlx-lm's if it has the type. The table of the others is of types that only mlx-vlm has."""
    assert {library_of({"model_type": kind}) for kind in ("llama", "kimi_k3", "muse_spark", "deepseek_v41")} == {
        "mlx-lm"
    }
    assert {library_of({"model_type": kind}) for kind in TEXT_OF_MLX_VLM} == {"mlx-vlm"}
    assert (
        library_of({"model_type": "sam3"}) is None and library_of({"model_type": "own", "model_file": "x"}) == "mlx-lm"
    )
    assert library_of({"model_type": "llava_bunny", "vision_config": {}}) == "mlx-vlm"


def test_an_ngram_table_on_the_disk_is_not_in_memory(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", model_type="qwen4_exp", text_config={"ple_storage": {"manifest": "ple.json"}})
    weights = folder / "model.safetensors"
    tensors = {"model.w": 10, f"model.layers.1{NGRAMS}shards.0.weight": 1000}
    ends = list(itertools.accumulate(tensors.values(), initial=0))
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            for (name, size), at in zip(tensors.items(), ends, strict=False)
        }
    ).encode()
    weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(ends[-1]))
    assert weights_on_disk(folder) == 10 and describe("m", folder).weight_bytes == 10
    assert doctor._weights(load_settings(None, model_path=str(folder))) == 10
    known = Capabilities("m", read_config(folder), Fact(families()["qwen3"], "config"))
    assert known.facts["library"].value == "mlx-vlm" and "not in memory" in known.facts["ngram_table"].value
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1010, "external_ple_bytes": "1000"}}))
    weights.unlink()  # as before it is fetched
    assert weights_on_disk(folder) == 10


def test_a_model_that_only_mlx_vlm_knows_is_right_if_it_sees(tmp_path: Path) -> None:
    only_there = architectures("mlx_vlm") - architectures()
    assert {"qwen2_5_vl", "smolvlm", "llava_bunny"} & only_there and "quasar9" not in only_there
    folder = build_vision_oracle(tmp_path)
    check_source(str(folder), command="x")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] in only_there
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="neither mlx-lm nor mlx-vlm has a text model of its type 'llava_bunny'"):
        check_source(str(folder), command="x")


def test_a_real_checkpoint_is_right(smol_path: Path, tmp_path: Path) -> None:
    check_source(str(smol_path), command="x")
    weights = smol_path / "model.safetensors"
    header = safetensors_header(weights)
    assert header is not None
    assert header.length + max(tensor.end for tensor in header.tensors.values()) == weights.stat().st_size
    check_source(str(build_oracle(tmp_path / "oracle", "plain")), command="x", trust_code=True)


def test_sharded_weights_are_looked_at_one_by_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    safetensors(folder / "model-00002-of-00002.safetensors", 128)
    check_source(str(folder), command="x")
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is cut short \(100 of"):
        check_source(str(folder), command="x")
