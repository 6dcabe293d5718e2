from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.disk import DiskTier
from start_llm.kvcache.diskindex import DiskIndex, FileRecord, Run

ROOT = PrefixHash().digest()
MAX = 10 << 20


def tokens_of(seed: int, count: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def write(tier: DiskTier, seed: int, parent: bytes = ROOT, start: int = 0) -> str:
    tokens = tokens_of(seed)
    run = Run(bytes([seed]) * 32, parent, start, tokens.tobytes(), "")
    return tier.write_run(run, {"rows": tokens.astype(np.float32)}, "meta")


def folder_of(tier_folder: Path) -> Path:
    return next(path for path in tier_folder.iterdir() if path.is_dir())


def test_written_and_found_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    before = tier.read(name)  # still on its way, or just written: both are served
    tier.write_checkpoint(bytes([1]) * 32, {"state": np.ones(3, np.uint16)}, "state meta")
    tier.flush()
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    runs, checkpoints = again.contents()
    assert [run.file for run in runs] == [name]
    assert runs[0].tokens == tokens_of(1).tobytes()
    found = again.read(name)
    assert before is not None and found is not None and found[1] == "meta"
    assert (found[0]["rows"] == before[0]["rows"]).all()
    state = again.read(checkpoints[runs[0].digest])
    assert state is not None and state[0]["state"].dtype == np.uint16
    again.close()


def test_modes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", "model", MAX)
    write(tier, 1)
    tier.flush()
    inside = folder_of(tmp_path / "kv")
    assert inside.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in inside.iterdir()}
    assert set(modes.values()) == {0o600} and len(modes) >= 3
    tier.close()


def test_other_fingerprints_see_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model a", MAX)
    write(tier, 1)
    tier.close()
    other = DiskTier(tmp_path, "model b", MAX)
    assert other.contents() == ([], {})
    other.close()


def test_a_second_server_runs_without_disk_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = DiskTier(tmp_path, "model", MAX)
    with caplog.at_level(logging.WARNING):
        second = DiskTier(tmp_path, "model", MAX)
    assert not second.active and "used by another server" in second.detail
    assert "used by another server" in caplog.text
    second.close()
    first.close()
    third = DiskTier(tmp_path, "model", MAX)
    assert third.active
    third.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "kv", "model", MAX)
    assert not tier.active and "file" in tier.detail


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_a_miss_said_once(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    tier.flush()
    path = folder_of(tmp_path) / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert tier.read(name) is None
        assert tier.read(name) is None
    assert caplog.text.count("is damaged") == 1
    tier.flush()
    assert not path.exists()
    assert tier.take_lost() == {name}
    assert tier.stats()["damaged"] == 1
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    assert again.contents() == ([], {})
    again.close()


def test_opening_makes_index_and_folder_agree(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    gone = write(tier, 1)
    write(tier, 2, parent=bytes([1]) * 32, start=40)  # stands on the one that goes
    kept = write(tier, 3)
    tier.write_checkpoint(bytes([9]) * 32, {"state": np.ones(3)}, "")  # of nothing
    tier.close()
    inside = folder_of(tmp_path)
    (inside / gone).unlink()
    (inside / "r9-stray.safetensors").write_bytes(b"left by a killed process")
    (inside / "r8-stray.writing").write_bytes(b"left by a killed process")
    again = DiskTier(tmp_path, "model", MAX)
    runs, checkpoints = again.contents()
    assert [run.file for run in runs] == [kept] and checkpoints == {}
    assert {p.name for p in inside.iterdir() if p.suffix in (".safetensors", ".writing")} == {kept}
    again.close()


def test_an_unusable_index_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    write(tier, 1)
    tier.close()
    (folder_of(tmp_path) / "index.sqlite").write_bytes(b"not a database at all" * 100)
    with caplog.at_level(logging.WARNING):
        again = DiskTier(tmp_path, "model", MAX)
    assert again.active and again.contents() == ([], {})
    assert "made anew" in caplog.text
    name = write(again, 2)
    again.flush()
    assert again.read(name) is not None
    again.close()


def test_the_budget_takes_the_longest_unused_ends(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", 1 << 20)
    first = write(tier, 1)
    tier.flush()
    each = tier.stats()["bytes"]
    tier.close()

    tier = DiskTier(tmp_path, "model", 3 * each)
    above, below = write(tier, 2), write(tier, 3, parent=bytes([2]) * 32, start=40)
    tier.touch((first,))
    write(tier, 4)
    tier.flush()
    assert tier.take_lost() == {below}  # the oldest that nothing stands on; `first` was used again
    assert tier.read(first) is not None and tier.read(above) is not None
    assert tier.stats()["bytes"] <= 3 * each
    tier.close()


def test_models_not_in_use_give_way_first(tmp_path: Path) -> None:
    old = DiskTier(tmp_path, "old", 1 << 20)
    write(old, 1)
    old.flush()
    each = old.stats()["bytes"]
    old.close()
    tier = DiskTier(tmp_path, "new", 2 * each)
    names = [write(tier, 2), write(tier, 3)]
    tier.flush()
    assert all(tier.read(name) is not None for name in names)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    tier.close()


def test_a_divided_run_is_found_in_parts_of_one_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    tier.split(bytes([1]) * 32, bytes([7]) * 32, 15)
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    upper, lower = again.contents()[0]
    assert (upper.file, upper.first, upper.start, upper.digest) == (name, 0, 0, bytes([7]) * 32)
    assert (lower.file, lower.first, lower.start, lower.parent) == (name, 15, 15, upper.digest)
    assert upper.tokens + lower.tokens == tokens_of(1).tobytes()
    again.close()


def test_a_full_queue_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX, queue_bytes=100)
    assert tier.has_room(1 << 30)  # never refuses what could not be written at all otherwise
    tier.flush()
    tier._waiting_bytes = 60
    assert tier.has_room(40) and not tier.has_room(41)
    tier._waiting_bytes = 0
    tier.close()


def test_failed_writes_are_lost_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    inside = folder_of(tmp_path)
    blocker = inside / f"r0-{(bytes([1]) * 32).hex()}.safetensors"
    blocker.mkdir()  # os.replace fails on a folder
    (blocker / "x").write_text("")
    with caplog.at_level(logging.WARNING):
        name = write(tier, 1)
        tier.flush()
    assert "could not be written" in caplog.text
    assert tier.take_lost() == {name} and tier.read(name) is None
    assert tier.read(write(tier, 2)) is not None
    tier.close()


def test_index_drops_what_stands_on_a_file(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path / "index.sqlite")
    for number, parent in ((1, ROOT), (2, b"\1" * 32), (3, b"\2" * 32), (4, ROOT)):
        file = FileRecord(f"f{number}", 10, b"", "")
        index.add_run(Run(bytes([number]) * 32, parent, number, b"1234", file.name), file)
    index.add_checkpoint(b"\3" * 32, FileRecord("c3", 10, b"", ""))
    assert set(index.drop_file("f2")) == {"f2", "f3", "c3"}
    assert [run.file for run in index.runs()] == ["f1", "f4"]
    index.close()


def kill_writers(folder: Path, kills: int) -> None:
    program = Path(__file__).with_name("disk_writer.py")
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": repository}
    done = subprocess.run(
        [sys.executable, str(program), str(folder), str(kills), "1"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_kill_at_any_moment(tmp_path: Path) -> None:
    kill_writers(tmp_path, 20)


@pytest.mark.slow
def test_kill_at_any_moment_many_times(tmp_path: Path) -> None:
    kill_writers(tmp_path, 200)
