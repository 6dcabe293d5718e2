"""Two checkpoints that make different KV are told apart, wherever they differ."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from start_llm.models import fingerprint as module
from start_llm.models.fingerprint import WeightsDigest, fingerprint, stamps_of

NAMES = [f"model.layers.{number}.weight" for number in range(10)]
SHAPE = (512, 256)  # ten of them are 5 MiB


def checkpoint(folder: Path, **changes: int) -> Path:
    """`changes`: which value of which layer is another one."""
    folder.mkdir()
    weights = {name: np.zeros(SHAPE, np.float32) for name in NAMES}
    for name, place in changes.items():
        weights[f"model.layers.{name[1:]}.weight"].reshape(-1)[place] = 1.0
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("layer", range(10))
def test_a_copy_that_differs_in_one_layer_is_another_model(tmp_path: Path, layer: int) -> None:
    """A fused adapter changes some layers; which of them lie at the file's ends is up to who wrote it."""
    base, tuned = checkpoint(tmp_path / "base"), checkpoint(tmp_path / "tuned", **{f"_{layer}": 0})
    grown = checkpoint(tmp_path / "grown", **{f"_{layer}": SHAPE[0] * SHAPE[1] - 1})  # tokens that were added
    sizes = {(folder / "model.safetensors").stat().st_size for folder in (base, tuned, grown)}
    assert len(sizes) == 1, "else they could be told by that"
    assert len({fingerprint(folder) for folder in (base, tuned, grown)}) == 3


def test_a_copy_that_is_the_same_is_the_same_model(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base")
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not looked at")
    assert fingerprint(base) == fingerprint(tmp_path / "copy")
    assert fingerprint(base) != fingerprint(base, extra="kv 8")


@pytest.mark.parametrize("header", [b"x" * 99, b'{"a": {"data_offsets": [-9, 4]}}', b'{"a": {"data_offsets": [9, 4]}}'])
def test_a_file_without_a_sound_header_has_a_fingerprint_too(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert fingerprint(tmp_path) != fingerprint(tmp_path.parent)


def test_a_digest_is_of_every_byte_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file is written in place and its time of change is set back."""
    base, kept = checkpoint(tmp_path / "base"), tmp_path / "kept"
    file = base / "model.safetensors"
    monkeypatch.setattr(module, "LITTLE_BYTES", 0)
    assert WeightsDigest(stamps_of(base), kept).value == ""
    found, about, chance = {WeightsDigest(stamps_of(base), kept).compute()}, file.stat(), random.Random(7)
    for place in (about.st_size - 1, *chance.sample(range(4096, about.st_size - 1), 50)):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\x01")
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        stamps = stamps_of(base)
        assert WeightsDigest(stamps, kept).value == "", place
        found.add(WeightsDigest(stamps, kept).compute())
    assert len(found) == 52
    shutil.copytree(base, tmp_path / "copy")
    assert WeightsDigest(stamps_of(tmp_path / "copy"), kept).compute() == WeightsDigest(stamps, kept).value
    assert WeightsDigest(stamps, kept).compute(lambda: True) == ""
    file.touch()
    with pytest.raises(OSError, match="was changed"):
        WeightsDigest(stamps, kept).compute()
