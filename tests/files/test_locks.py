from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from start_llm.files.locks import FileLock, is_locked, locked

HOLD = """
import sys; from pathlib import Path; from start_llm.files.locks import FileLock
lock = FileLock(Path(sys.argv[1])); assert lock.take(); print("held", flush=True); sys.stdin.read()
"""


@pytest.mark.live
def test_one_holder_and_none_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    assert not is_locked(path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert is_locked(path) and not FileLock(path).take()
    holder.kill()
    holder.communicate()
    assert not is_locked(path)
    mine = FileLock(path)
    assert mine.take() and mine.is_held and path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.take() and is_locked(tmp_path / "lock")
    lock.drop()
    lock.drop()
    assert list(tmp_path.iterdir()) == [] and FileLock(tmp_path / "lock").take()


def test_what_stands_in_a_locks_place_leads_nowhere_else(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "lock", tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    with pytest.raises(OSError):
        FileLock(path).take()
    assert not elsewhere.exists() and not is_locked(path)
    path.unlink()
    os.mkfifo(path)
    assert not is_locked(path)  # and it does not wait for a writer


def test_a_lock_that_is_not_taken_over_from_somebody_elses_file(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.take() and first.stands()
    (tmp_path / "lock").unlink()
    assert not first.stands() and second.take()  # a new file: the first one's lock is on one that nobody finds
    first.drop()
    assert second.stands()  # its file was not removed


def test_a_folder_is_locked_by_one_or_shared_by_some(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path), FileLock(tmp_path)
    assert first.take() and not second.take() and not second.take(shared=True)
    first.share()
    assert second.take(shared=True) and not FileLock(tmp_path).take()
    first.drop()
    second.drop()
    assert FileLock(tmp_path).take() and tmp_path.is_dir()


def test_a_block_waits_for_its_lock_within_bounds(tmp_path: Path) -> None:
    with locked(tmp_path, seconds=0):
        with pytest.raises(TimeoutError, match="locked by another process"), locked(tmp_path, seconds=0.05):
            raise AssertionError("two in one block")
        later = threading.Thread(target=lambda: FileLock(tmp_path).take(20))
        later.start()
    later.join(60)
    assert not later.is_alive()
