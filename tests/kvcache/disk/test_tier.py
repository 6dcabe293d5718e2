from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from start_llm.kvcache.disk.folder import DiskFolder
from start_llm.kvcache.disk.format import StoredPiece
from start_llm.kvcache.disk.tier import DiskTier
from tests.kvcache.segments import adjusted
from tests.waiting import PATIENCE_SECONDS, until

MAX = 10 << 20


def tokens_of(seed: int, count: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def write(tier: DiskTier, seed: int, above: str = "", start: int = 0) -> str:
    tokens = tokens_of(seed)
    piece = StoredPiece(bytes([seed]) * 32, above, start, tokens.tobytes(), 0.25)
    return tier.write(piece, {"rows": tokens.astype(np.float32)}, "layout")


def write_checkpoint(tier: DiskTier, seed: int, above: str, start: int = 40) -> str:
    return tier.write(StoredPiece(bytes([seed]) * 32, above, start), {"state": np.ones(3, np.uint16)}, "of a state")


def names(tier: DiskTier) -> list[str]:
    return [piece.name for piece in tier.contents()]


def folder_of(tier_folder: Path) -> Path:
    return next(path for path in tier_folder.iterdir() if path.is_dir())


def test_written_and_found_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    before = tier.read(name)  # still on its way, or just written: both are served
    checkpoint = write_checkpoint(tier, 1, name)
    tier.flush()
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    run, state = again.contents()
    assert run == StoredPiece(bytes([1]) * 32, "", 0, tokens_of(1).tobytes(), 0.25) and run.name == name
    assert state == StoredPiece(bytes([1]) * 32, name, 40) and state.name == checkpoint
    assert again.contents() == []
    found = again.read(name)
    assert before is not None and found is not None and before[1] == found[1] == "layout"
    assert (found[0]["rows"] == before[0]["rows"]).all()
    rebuilt = again.read(checkpoint)
    assert rebuilt is not None and rebuilt[0]["state"].dtype == np.uint16 and rebuilt[1] == "of a state"


def test_while_nobody_knows_whose_kv_it_is_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = DiskTier(tmp_path, "model", MAX)
    name = write(first, 1)
    first.close()
    known = threading.Event()
    tier = adjusted(retry_seconds=0.01)(tmp_path, lambda is_over: "model" if known.wait(60) else "", MAX)
    assert not tier.ready and tier.contents() == [] and tier.read(name) is None and "weights" in tier.detail
    known.set()
    until(lambda: tier.ready, "the tier does not open")
    assert names(tier) == [name] and tier.read(name) is not None
    tier.close()
    assert not caplog.text  # that is how each model's first start goes

    def is_given_up(is_over: Callable[[], bool]) -> str:
        until(is_over, "nobody says that it is over")
        return ""

    never = DiskTier(tmp_path, is_given_up, MAX)
    never.close()
    lost = adjusted(retry_seconds=0.01)(tmp_path, Mock(side_effect=OSError("it was changed")), MAX)
    until(lambda: lost.detail == "it was changed", "why is not told")
    lost.flush()
    assert not lost.ready and not never.ready and len(list(tmp_path.iterdir())) == 1


def test_it_is_not_ready_before_its_folder_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def opened(*given: Any) -> DiskFolder:
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        return DiskFolder(*given)

    monkeypatch.setattr("start_llm.kvcache.disk.tier.DiskFolder", opened)
    tier = DiskTier(tmp_path, lambda is_over: "model", MAX)
    assert begun.wait(PATIENCE_SECONDS) and not tier.ready
    go.set()
    until(lambda: tier.ready, "the tier does not open")


def test_names_of_files_are_not_kept(tmp_path: Path) -> None:
    """What `pathlib` of Python 3.12 has once seen as a part of a path stays in memory for good."""
    tier = DiskTier(tmp_path, "model", MAX)
    piece = StoredPiece(os.urandom(32), "", 0, tokens_of(1).tobytes(), 0.25)
    name = tier.write(piece, {"rows": np.ones(3, np.float32)}, "layout")
    tier.flush()
    tier.touch((name,))
    tier.flush()
    assert tier.read(name) is not None
    tier.drop(name)
    tier.close()
    kept = "".join(name)
    assert kept is not name and sys.intern(kept) is kept, "else an equal one was interned before"


def test_modes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", "model", MAX)
    write(tier, 1)
    tier.flush()
    inside = folder_of(tmp_path / "kv")
    assert inside.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in inside.iterdir()}
    assert set(modes.values()) == {0o600} and len(modes) >= 2


def test_a_second_server_waits_for_the_folder_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = DiskTier(tmp_path, "model", MAX)
    name = write(first, 1)
    second = adjusted(retry_seconds=0.05)(tmp_path, "model", MAX)
    assert "used by another server" in second.detail  # `ready` again after 0.05 s, for a try
    lost = write(second, 2)
    second.flush()
    assert second.take_lost() == {lost} and second.read(lost) is None
    time.sleep(0.2)
    assert caplog.text.count("used by another server") == 1
    assert first.stats()["files"] == 1
    first.close()
    until(lambda: not second.detail)
    assert names(second) == [name]
    assert second.read(name) is not None and second.read(write(second, 3)) is not None
    until(lambda: "goes on" in caplog.text)  # the line is written a moment after


def test_a_folder_that_can_be_made_later(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = adjusted(retry_seconds=0.05)(tmp_path / "file" / "kv", "model", MAX)
    assert "file" in tier.detail
    (tmp_path / "file").unlink()
    until(lambda: not tier.detail)
    assert tier.read(write(tier, 1)) is not None


def test_a_full_disk_is_said_once_and_the_tier_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsync, is_full = os.fsync, threading.Event()

    def written(descriptor: int) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", written)
    tier = adjusted(retry_seconds=0.2)(tmp_path, "model", MAX)
    kept = write(tier, 1)
    tier.flush()
    is_full.set()
    lost = {write(tier, seed) for seed in range(2, 12)}
    tier.flush()
    assert tier.stats()["paused"] == 1
    assert tier.take_lost() == lost and tier.read(kept) is not None
    assert tier.stats()["waiting_bytes"] == 0
    until(lambda: tier.ready)  # time for the next try, which fails as well
    write(tier, 12)
    tier.flush()
    assert tier.stats()["paused"] == 1
    assert caplog.text.count("No space left") == 1
    is_full.clear()
    until(lambda: tier.ready)
    name = write(tier, 13)
    tier.flush()
    assert tier.ready and not tier.detail and tier.stats()["pauses"] == 1
    assert "goes on" in caplog.text
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    assert set(names(again)) == {kept, name}
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {kept, name, "lock"}


def test_some_of_the_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = adjusted(retry_seconds=600)(tmp_path, "model", MAX)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    name = write(tier, 1)
    tier.flush()
    assert tier.take_lost() == {name} and "of the disk are free" in tier.detail and not tier.ready


def test_a_folder_that_is_deleted_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = adjusted(retry_seconds=0.05)(tmp_path, "model", MAX)
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


@pytest.mark.parametrize("damage", ["cut", "flip", "emptied", "gone", "a pipe"])
def test_damage_is_a_miss_said_once(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    name = write(tier, 1)
    tier.flush()
    path = folder_of(tmp_path) / name
    data = path.read_bytes()
    path.unlink()
    if damage == "a pipe":
        os.mkfifo(path)
    elif damage != "gone":
        path.write_bytes({"cut": data[:-1], "flip": data[:-1] + bytes([data[-1] ^ 1]), "emptied": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert tier.read(name) is None
        assert tier.read(name) is None
    assert caplog.text.count("is damaged") == 1
    tier.flush()
    assert not path.exists()
    assert tier.take_lost() == {name}
    assert [tier.stats()[name] for name in ("damaged", "files", "bytes")] == [1, 0, 0]
    tier.close()
    again = DiskTier(tmp_path, "model", MAX)
    assert again.contents() == []


def test_opening_removes_what_nothing_leads_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    gone, kept = write(tier, 1), write(tier, 3)
    below = write(tier, 2, gone, start=40)
    write_checkpoint(tier, 2, below, start=80)
    write_checkpoint(tier, 4, kept, start=7)  # inside the run
    tier.close()
    inside = folder_of(tmp_path)
    (inside / gone).unlink()
    (inside / f".{kept}.0123abcd.writing").write_bytes(b"left by a killed process")
    (inside / f"r9-{'07' * 32}.kv").write_bytes(b"left by somebody")
    (inside / "notes.txt").write_text("nobody's business")
    again = DiskTier(tmp_path, "model", MAX)
    assert [piece.name[:2] for piece in again.contents()] == ["r0", "c7"]
    assert {path.name[:2] for path in inside.iterdir()} == {"r0", "c7", "lo", "no"}
    assert "1 files cannot be read and were removed, r9-" in caplog.text


@pytest.mark.parametrize("where", range(0, 500, 7))
def test_a_changed_head_is_not_believed(tmp_path: Path, where: int) -> None:
    """Served, it would be the KV of other tokens."""
    tier = DiskTier(tmp_path, "model", MAX)
    path = folder_of(tmp_path) / write(tier, 1)
    tier.close()
    data = bytearray(path.read_bytes())
    data[where] ^= 1 << (where % 8)
    path.write_bytes(data)
    again = DiskTier(tmp_path, "model", MAX)
    if (found := again.contents()) != []:  # a byte behind the tokens
        assert found[0].tokens == tokens_of(1).tobytes() and again.read(path.name) is None
        again.flush()
    assert not path.exists()


def test_a_file_under_another_name_or_of_another_model_is_not_believed(tmp_path: Path) -> None:
    tiers = [DiskTier(tmp_path, model, MAX) for model in ("one", "two")]
    name = write(tiers[0], 1)
    for tier in tiers:
        tier.close()
    (one,) = [path.parent for path in tmp_path.glob("*/r*")]
    (two,) = [path for path in tmp_path.iterdir() if path != one]
    shutil.copy(one / name, two / name)
    shutil.copy(one / name, one / name.replace("01", "02"))
    tiers = [DiskTier(tmp_path, model, MAX) for model in ("one", "two")]
    assert names(tiers[0]) == [name] and names(tiers[1]) == [] and list(one.glob("r*")) == [one / name]


def test_foreign_names_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_text("not ours to delete")
    DiskTier(tmp_path / "kv", "model", MAX).close()
    inside = folder_of(tmp_path / "kv")
    link, pipe = inside / f"r0-{'01' * 32}.kv", inside / f"r0-{'02' * 32}.kv"
    link.symlink_to(outside)
    os.mkfifo(pipe)
    (inside / "other.kv").symlink_to(outside)
    tier = DiskTier(tmp_path / "kv", "model", MAX)
    assert tier.contents() == [] and not link.is_symlink() and not pipe.exists()
    write(tier, 3)
    for name in ("../../precious", f"../{'01' * 32}", str(outside)):
        assert tier.read(name) is None
        tier.drop(name)
    tier.flush()
    assert outside.read_text() == "not ours to delete"


def test_a_file_that_is_too_many_is_no_reason_to_lose_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    path = folder_of(tmp_path) / write(tier, 1)
    tier.close()
    plain = os.open

    def full(wanted: Any, *rest: Any, **more: Any) -> int:
        if str(wanted) == str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(wanted, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    again = adjusted(retry_seconds=0.05)(tmp_path, "model", MAX)
    assert "Too many open files" in again.detail
    monkeypatch.setattr(os, "open", plain)
    until(lambda: not again.detail)
    assert names(again) == [path.name]


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    """KV_DISK_DIR may name any folder."""
    foreign = tmp_path / "photographs"
    foreign.mkdir()
    (foreign / f"r0-{'07' * 32}.kv").write_bytes(bytes(1000))
    tier = DiskTier(tmp_path, "model", 100)
    write(tier, 1)
    tier.flush()
    assert len(list(foreign.iterdir())) == 1


@pytest.mark.parametrize("now", [10**12, 3 * 10**18], ids=["set back by years", "ahead by decades"])
def test_uses_are_ordered_whatever_the_clock_says(tmp_path: Path, now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    first, second = write(tier, 1), write(tier, 2)
    tier.flush()
    each = tier.stats()["bytes"] // 2
    tier.close()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    tier = DiskTier(tmp_path, "model", 2 * each)
    tier.touch((first,))
    third = write(tier, 3)
    tier.flush()
    assert tier.take_lost() == {second}
    assert tier.read(first) is not None and tier.read(third) is not None
    tier.close()
    assert names(DiskTier(tmp_path, "model", each)) == [third]


def test_the_budget_takes_the_longest_unused_ends(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", 1 << 20)
    first = write(tier, 1)
    tier.flush()
    each = tier.stats()["bytes"]
    tier.close()

    tier = DiskTier(tmp_path, "model", 3 * each)
    above = write(tier, 2)
    below = write(tier, 3, above, start=40)
    tier.touch((first,))
    write(tier, 4)
    tier.flush()
    assert tier.take_lost() == {below}  # the oldest that nothing stands on; `first` was used again
    assert tier.read(first) is not None and tier.read(above) is not None
    assert tier.stats()["bytes"] <= 3 * each


def test_models_not_in_use_give_way_first(tmp_path: Path) -> None:
    old = DiskTier(tmp_path, "old", 1 << 20)
    write(old, 1)
    old.flush()
    each = old.stats()["bytes"]
    old.close()
    tier = DiskTier(tmp_path, "new", 2 * each)
    written = [write(tier, 2), write(tier, 3)]
    tier.flush()
    assert all(tier.read(name) is not None for name in written)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_full_queue_says_so(tmp_path: Path) -> None:
    tier = adjusted(queue_bytes=100)(tmp_path, "model", MAX)
    assert tier.has_room(1 << 30)  # never refuses what could not be written at all otherwise
    tier.flush()
    tier.waiting_bytes = 60
    assert tier.has_room(40) and not tier.has_room(41)
    tier.waiting_bytes = 0


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    blocker = folder_of(tmp_path) / f"r0-{'01' * 32}.kv"
    blocker.mkdir()
    (blocker / "x").write_text("")
    name = write(tier, 1)
    tier.flush()
    assert tier.read(name) is not None and tier.take_lost() == set()


def test_a_file_takes_along_what_stands_on_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    first = write(tier, 1)
    second = write(tier, 2, first, start=40)
    third = write(tier, 3, second, start=60)
    state = write_checkpoint(tier, 3, third, start=100)
    other = write(tier, 4)
    tier.drop(second)
    tier.flush()
    late = write(tier, 5, second, start=60)
    tier.flush()
    assert tier.take_lost() == {second, third, state, late} and tier.stats()["files"] == 2
    tier.close()
    again = DiskTier(tmp_path, "model", 1)  # all but the last has to go, ends first
    assert names(again) == [] and again.stats()["evicted_files"] == 2
    again.close()
    assert not list(tmp_path.glob("*/r*")), (first, other)


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", MAX)
    written = [write(tier, seed) for seed in range(1, 5)]
    tier.touch((written[0], written[2]))
    tier.flush()
    each = tier.stats()["bytes"] // 4
    tier.close()
    again = DiskTier(tmp_path, "model", 2 * each)
    assert set(names(again)) == {written[0], written[2]}


@pytest.mark.live
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_at_any_moment(tmp_path: Path, kills: int) -> None:
    program = str(Path(__file__).parents[1] / "disk_writer.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, program, str(tmp_path), str(kills), "1"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
