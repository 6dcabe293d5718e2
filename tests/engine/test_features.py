"""What the vision tower made of images: kept in memory and in files, and never read from a damaged one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from start_llm.engine.features import Features, FeatureStore


def made(seed: int, tokens: int = 4, dtype: mx.Dtype = mx.bfloat16) -> Features:
    rows = mx.arange(tokens * 8).reshape(tokens, 8).astype(dtype) + seed
    return Features(rows, (rows + 1,), (2, 2) if seed % 2 else None)


class Tower:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def of(self, seed: int) -> Callable[[], Features]:
        def make() -> Features:
            self.asked.append(seed)
            return made(seed)

        return make


def same(one: Features, two: Features) -> bool:
    arrays = zip((one.rows, *one.deep), (two.rows, *two.deep), strict=True)
    return one.grid == two.grid and all(a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in arrays)


def test_memory_is_bounded_and_the_file_comes_after_it(tmp_path: Path) -> None:
    tower = Tower()
    store = FeatureStore(3 * made(0).nbytes, tmp_path, 1 << 20)
    for seed in (*range(6), *range(6)):
        assert same(store.get(f"image {seed}", tower.of(seed)), made(seed))
    assert tower.asked == list(range(6))
    assert sum(features.nbytes for _, features in store._held.items()) <= 3 * made(0).nbytes
    assert {path.suffix for path in tmp_path.iterdir()} == {".features"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir()), "pictures are private"


def test_files_outlive_the_process_and_belong_to_their_model(tmp_path: Path) -> None:
    tower = Tower()
    for model in ("one", "one", "two"):
        store = FeatureStore(1 << 20, tmp_path, 1 << 20, model=model)
        assert same(store.get("image", tower.of(3)), made(3))
    assert tower.asked == [3, 3], "once for each model"


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    tower = Tower()
    for folder, most in ((None, 1 << 20), (tmp_path / "none", 0)):
        store = FeatureStore(1, folder, most)
        store.get("a", tower.of(1))
        store.get("b", tower.of(2))
        store.get("a", tower.of(1))
    assert tower.asked == [1, 2, 1] * 2 and not (tmp_path / "none").exists()


@pytest.mark.parametrize("place", ["head", "middle", "end", "short", "empty", "folder"])
def test_a_damaged_file_is_not_there(tmp_path: Path, place: str) -> None:
    tower = Tower()
    FeatureStore(1 << 20, tmp_path, 1 << 20).get("image", tower.of(1))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if place == "short":
        del data[-5:]
    elif place == "empty":
        data.clear()
    elif place != "folder":
        at = {"head": 3, "middle": len(data) // 2, "end": len(data) - 1}[place]
        data[at] ^= 0x41
    path.unlink()
    if place == "folder":
        path.mkdir()
    else:
        path.write_bytes(data)
    for _ in range(2):
        store = FeatureStore(1 << 20, tmp_path, 1 << 20)
        assert same(store.get("image", tower.of(1)), made(1))
    assert tower.asked == ([1, 1, 1] if place == "folder" else [1, 1]), "it is made once more, and written anew"


def test_the_file_that_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    tower = Tower()
    FeatureStore(1, tmp_path, 1 << 20).get("image 0", tower.of(0))
    (path,) = tmp_path.iterdir()
    most = 3 * path.stat().st_size + 10
    for seed in (1, 2):
        FeatureStore(1, tmp_path, most).get(f"image {seed}", tower.of(seed))
    for age, file in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)):
        os.utime(file, (1000 + age, 1000 + age))
    FeatureStore(1, tmp_path, most).get("image 0", tower.of(0))  # it is used again
    FeatureStore(1, tmp_path, most).get("image 3", tower.of(3))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most
    assert tower.asked == [0, 1, 2, 3]
    FeatureStore(1, tmp_path, most).get("image 0", tower.of(0))
    FeatureStore(1, tmp_path, most).get("image 1", tower.of(1))
    assert tower.asked == [0, 1, 2, 3, 1]


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    tower = Tower()
    (tmp_path / "file").write_text("")
    store = FeatureStore(1 << 20, tmp_path / "file" / "images", 1 << 20)
    assert same(store.get("image", tower.of(1)), made(1)) and same(store.get("image", tower.of(1)), made(1))
    assert tower.asked == [1]
