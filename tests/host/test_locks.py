from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.host.locks import ProcessLock, is_locked

HOLD = """
import sys; from pathlib import Path; from start_llm.host.locks import ProcessLock
lock = ProcessLock(Path(sys.argv[1])); assert lock.take(); print("held", flush=True); sys.stdin.read()
"""


def test_one_holder_and_none_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    assert not is_locked(path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert is_locked(path) and not ProcessLock(path).take()
    holder.kill()
    holder.communicate()
    assert not is_locked(path)
    mine = ProcessLock(path)
    assert mine.take() and mine.is_held and path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "lock")
    assert lock.take() and is_locked(tmp_path / "lock")
    lock.drop()
    lock.drop()
    assert list(tmp_path.iterdir()) == [] and ProcessLock(tmp_path / "lock").take()


def test_a_file_that_was_removed_under_a_waiting_taker_is_not_taken(tmp_path: Path) -> None:
    first, second = ProcessLock(tmp_path / "lock"), ProcessLock(tmp_path / "lock")
    assert first.take()
    (tmp_path / "lock").unlink()
    assert second.take()  # a new file: the old holder's lock is on one that nobody finds
    assert (tmp_path / "lock").exists()


def test_what_stands_in_a_locks_place_leads_nowhere_else(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "lock", tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    with pytest.raises(OSError):
        ProcessLock(path).take()
    assert not elsewhere.exists() and not is_locked(path)
    path.unlink()
    os.mkfifo(path)
    assert not is_locked(path)  # and it does not wait for a writer
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        ProcessLock(path).take()
