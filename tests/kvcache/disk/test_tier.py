from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.disk.index import DiskIndex, FileRecord, TokenRun, checkpoint_file
from start_llm.kvcache.disk.tier import DiskTier

ROOT = PrefixHash().digest()
MAX = 10 << 20


def tokens_of(seed: int, count: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def write(tier: DiskTier, seed: int, parent: bytes = ROOT, start: int = 0) -> str:
    tokens = tokens_of(seed)
    run = TokenRun(bytes([seed]) * 32, parent, start, tokens.tobytes(), "")
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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_second_server_waits_for_the_folder_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = DiskTier(tmp_path, "model", MAX)
    name = write(first, 1)
    second = DiskTier(tmp_path, "model", MAX, retry_seconds=0.05)
    assert not second.ready and "used by another server" in second.detail
    lost = write(second, 2)
    second.flush()
    assert second.take_lost() == {lost} and second.read(lost) is None
    time.sleep(0.2)
    assert caplog.text.count("used by another server") == 1
    assert first.stats()["files"] == 1
    first.close()
    until(lambda: not second.detail)
    assert [run.file for run in second.contents()[0]] == [name]
    assert second.read(name) is not None and second.read(write(second, 3)) is not None
    assert "goes on" in caplog.text
    second.close()


def test_a_folder_that_can_be_made_later(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "kv", "model", MAX, retry_seconds=0.05)
    assert not tier.ready and "file" in tier.detail
    (tmp_path / "file").unlink()
    until(lambda: not tier.detail)
    assert tier.read(write(tier, 1)) is not None
    tier.close()


class FullDisk:
    """`os.fsync` that finds the disk full while it is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(descriptor)


def test_a_full_disk_is_said_once_and_the_tier_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    tier = DiskTier(tmp_path, "model", MAX, retry_seconds=0.2)
    kept = write(tier, 1)
    tier.flush()
    disk.full = True
    lost = {write(tier, seed) for seed in range(2, 12)}
    tier.flush()
    assert not tier.ready and tier.stats()["paused"] == 1
    assert tier.take_lost() == lost and tier.read(kept) is not None
    assert tier.stats()["waiting_bytes"] == 0
    until(lambda: tier.ready)  # time for the next try, which fails as well
    write(tier, 12)
    tier.flush()
    assert not tier.ready
    assert caplog.text.count("No space left") == 1
    disk.full = False
    until(lambda: tier.ready)
    name = write(tier, 13)
    tier.flush()
    assert tier.ready and not tier.detail and tier.stats()["pauses"] == 1
    assert "goes on" in caplog.text
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    assert {run.file for run in again.contents()[0]} == {kept, name}
    assert not [path for path in folder_of(tmp_path).iterdir() if path.suffix == ".writing"]
    again.close()


def test_some_of_the_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, "model", MAX, retry_seconds=0.05)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    name = write(tier, 1)
    tier.flush()
    assert tier.take_lost() == {name} and "of the disk are free" in tier.detail
    tier.close()


def test_a_folder_that_is_deleted_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX, retry_seconds=0.05)
    before = write(tier, 1)
    tier.flush()
    shutil.rmtree(tmp_path)
    tier.touch((before,))
    tier.flush()
    until(lambda: tier.ready)
    name = write(tier, 2)
    tier.flush()
    assert before in tier.take_lost() and tier.read(before) is None
    assert tier.read(name) is not None
    other = DiskTier(tmp_path, "model", MAX)
    assert not other.ready  # the new folder is held, too
    other.close()
    tier.close()


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
    stray = f"r9-{(bytes([7]) * 32).hex()}"
    (inside / f"{stray}.safetensors").write_bytes(b"left by a killed process")
    (inside / f"{stray}.writing").write_bytes(b"left by a killed process")
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
    again = DiskTier(tmp_path, "model", MAX)
    assert again.ready and again.contents() == ([], {})
    assert caplog.text.count("is damaged") == 1
    name = write(again, 2)
    again.flush()
    assert again.read(name) is not None
    again.close()


def test_an_index_that_is_damaged_in_use_is_made_anew(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    first = write(tier, 1)
    tier.flush()
    index = folder_of(tmp_path) / "index.sqlite"
    index.write_bytes(index.read_bytes()[:100] + bytes(5000))
    second = write(tier, 2)
    tier.flush()
    assert tier.take_lost() == {first, second} and tier.ready
    third = write(tier, 3)
    tier.flush()
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    assert [run.file for run in again.contents()[0]] == [third] and again.read(third) is not None
    assert {path.name for path in folder_of(tmp_path).glob("*.safetensors")} == {third}
    again.close()


@pytest.mark.parametrize("column", ["file", "tokens", "first", "start", "parent", "seconds"])
def test_a_changed_row_is_not_believed(tmp_path: Path, column: str) -> None:
    """SQLite notices no changed value; served, it would be the KV of other tokens, or a file of somebody else."""
    outside = tmp_path / "precious.safetensors"
    outside.write_text("not ours to delete")
    tier = DiskTier(tmp_path / "kv", "model", MAX)
    write(tier, 1)
    tier.close()
    changed = {
        "file": "../../precious.safetensors",
        "tokens": tokens_of(2).tobytes(),
        "first": 1,
        "start": 1,
        "parent": hashlib.sha256(b"x").digest(),
        "seconds": "a word",
    }
    database = sqlite3.connect(folder_of(tmp_path / "kv") / "index.sqlite")
    database.execute(f"UPDATE runs SET {column} = ?", (changed[column],))
    database.commit()
    database.close()
    again = DiskTier(tmp_path / "kv", "model", MAX)
    assert again.ready and again.contents() == ([], {})
    again.close()
    assert outside.exists()


def test_names_are_checked_in_use_too(tmp_path: Path) -> None:
    outside = tmp_path / "precious.safetensors"
    outside.write_text("not ours to delete")
    tier = DiskTier(tmp_path / "kv", "model", MAX)
    write(tier, 1)
    tier.flush()
    database = sqlite3.connect(folder_of(tmp_path / "kv") / "index.sqlite")
    database.execute("UPDATE runs SET file = '../../precious.safetensors'")
    database.execute("UPDATE files SET name = '../../precious.safetensors'")
    database.commit()
    database.close()
    tier._folder._max = 100  # the next write drops the oldest
    write(tier, 2)
    tier.flush()
    assert outside.exists()
    tier.close()


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    """KV_DISK_DIR may name any folder."""
    foreign = tmp_path / "photographs"
    foreign.mkdir()
    (foreign / "index.sqlite").write_bytes(bytes(1000))
    tier = DiskTier(tmp_path, "model", 100)
    write(tier, 1)
    tier.flush()
    assert (foreign / "index.sqlite").exists()
    tier.close()


def test_uses_are_ordered_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    first, second = write(tier, 1), write(tier, 2)
    tier.flush()
    each = tier.stats()["bytes"] // 2
    tier.close()
    monkeypatch.setattr(time, "time", lambda: 1000.0)  # the clock was set back by years
    tier = DiskTier(tmp_path, "model", 2 * each)
    tier.touch((first,))
    third = write(tier, 3)
    tier.flush()
    assert tier.take_lost() == {second}
    assert tier.read(first) is not None and tier.read(third) is not None
    tier.close()


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


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    blocker = folder_of(tmp_path) / f"r0-{(bytes([1]) * 32).hex()}.safetensors"
    blocker.mkdir()
    (blocker / "x").write_text("")
    name = write(tier, 1)
    tier.flush()
    assert tier.read(name) is not None and tier.take_lost() == set()
    tier.close()


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    tier.flush()
    path = folder_of(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    assert tier.read(name) is None
    tier.close()


def test_damaged_files_no_longer_count(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    tier.flush()
    (folder_of(tmp_path) / name).write_bytes(b"")
    assert tier.read(name) is None
    tier.flush()
    assert tier.stats()["bytes"] == 0 and tier.stats()["files"] == 0
    tier.close()


def test_index_drops_what_stands_on_a_file(tmp_path: Path) -> None:
    def name(number: int) -> str:
        return f"r{number}-{bytes([number]).hex() * 32}.safetensors"

    index = DiskIndex(tmp_path / "index.sqlite")
    for number, parent in ((1, ROOT), (2, b"\1" * 32), (3, b"\2" * 32), (4, ROOT)):
        file = FileRecord(name(number), 10, b"", "")
        index.add_run(TokenRun(bytes([number]) * 32, parent, number, b"1234", file.name), file)
    state = checkpoint_file(b"\3" * 32)
    index.add_checkpoint(b"\3" * 32, FileRecord(state, 10, b"", ""))
    assert set(index.drop_files([name(2)])) == {name(2), name(3), state}
    assert [run.file for run in index.load().runs] == [name(1), name(4)]
    index.close()


def kill_writers(folder: Path, kills: int) -> None:
    program = Path(__file__).parents[1] / "disk_writer.py"
    repository = str(Path(__file__).parents[3])
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
