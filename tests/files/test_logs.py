from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from start_llm.files.logs import DailyLogs, begin_log, last_lines, trim_log
from tests.together import together

LINE = "x" * 999  # 1,000 bytes with its end
MOST = 400_000


def total(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.jsonl*"))


def test_all_files_together_stay_within_the_bound(tmp_path: Path) -> None:
    logs = DailyLogs(tmp_path, ".jsonl", MOST)
    for day in range(1, 10):
        for number in range(200):
            logs.append(f"2026-11-0{day}", f"session-{number % 7}.jsonl", LINE)
        assert total(tmp_path) <= MOST + MOST // 32
    days = sorted(path.name for path in tmp_path.iterdir())
    assert days[-1] == "2026-11-09" and "2026-11-06" not in days, "the oldest days went, folders and all"
    assert total(tmp_path) > MOST // 2


def test_one_file_rotates(tmp_path: Path) -> None:
    logs = DailyLogs(tmp_path, ".jsonl", MOST)
    for number in range(200):
        logs.append("2026-11-01", "s.jsonl", f"{number:03}" + LINE[3:])
    day = tmp_path / "2026-11-01"
    assert sorted(path.name for path in day.iterdir()) == ["s.jsonl", "s.jsonl.1"]
    assert max(path.stat().st_size for path in day.iterdir()) <= MOST // 8
    lines = ((day / "s.jsonl.1").read_text() + (day / "s.jsonl").read_text()).splitlines()
    assert [line[:3] for line in lines] == [f"{number:03}" for number in range(200 - len(lines), 200)]
    assert (day / "s.jsonl").stat().st_mode & 0o777 == 0o600


def test_what_is_not_a_log_or_stands_behind_a_link_is_never_deleted(tmp_path: Path) -> None:
    root = tmp_path / "logs"
    mine = tmp_path / "mine"
    others = [root / "notes" / "a.jsonl", root / "2026-11-01" / "thesis.md", root / "top.jsonl", mine / "a.jsonl"]
    for path in others:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("y" * MOST)
    (root / "2026-10-01").symlink_to(mine)
    logs = DailyLogs(root, ".jsonl", MOST)
    for number in range(2000):
        logs.append("2026-11-02", f"{number % 20}.jsonl", LINE)
    assert all(path.exists() for path in others)


def test_a_folder_of_any_name_is_kept_within_the_bound(tmp_path: Path) -> None:
    logs = DailyLogs(tmp_path / "[logs] of *?", ".jsonl", MOST, most_files=100)
    for number in range(400):
        logs.append("2026-11-01", f"{number}.jsonl", "{}")
    assert len(list(tmp_path.rglob("*.jsonl"))) <= 105


def test_the_file_that_is_written_stays_whatever_the_clock_said_before(tmp_path: Path) -> None:
    logs = DailyLogs(tmp_path, ".jsonl", MOST, most_files=20)
    for number in range(100):
        logs.append("2026-11-09", f"{number}.jsonl", "{}")
        logs.append("2026-11-01", "now.jsonl", "{}")
        assert (tmp_path / "2026-11-01" / "now.jsonl").exists()
        logs.append("2026-11-01", f"{number}.jsonl", "{}")
        assert (tmp_path / "2026-11-01" / f"{number}.jsonl").exists()


def test_names_of_files_are_not_kept(tmp_path: Path) -> None:
    """`pathlib` of Python 3.12 interns each part of a path, and what is interned stays for good: 100 bytes for each
    conversation."""
    logs, name = DailyLogs(tmp_path, ".jsonl", MOST, most_files=2), f"session-{tmp_path.name}-{os.getpid()}.jsonl"
    for number in range(5):
        logs.append("2026-11-01", f"{number}{name}", LINE)
    kept = "".join([*"2", *name])
    assert sys.intern(kept) is kept, "else an equal one was interned before"


def test_threads(tmp_path: Path) -> None:
    logs = DailyLogs(tmp_path, ".jsonl", 1 << 30)
    together([lambda: [logs.append("2026-11-01", "s.jsonl", LINE) for _ in range(100)]] * 4)
    assert (tmp_path / "2026-11-01" / "s.jsonl").read_text() == (LINE + "\n") * 400


def test_a_pipe_in_the_place_of_a_log_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "2026-11-01").mkdir()
    os.mkfifo(tmp_path / "2026-11-01" / "s.jsonl")
    with pytest.raises(OSError):
        DailyLogs(tmp_path, ".jsonl", MOST).append("2026-11-01", "s.jsonl", LINE)


def test_a_run_has_a_log_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "proxy.log"
    for word in (b"first", b"second", b"third"):
        descriptor = begin_log(path)
        os.write(descriptor, word)
        os.close(descriptor)
    assert path.read_bytes() == b"third" and Path(f"{path}.1").read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_opened_goes_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    descriptor = begin_log(tmp_path / "file" / "proxy.log")
    assert os.write(descriptor, b"x") == 1
    os.close(descriptor)


def test_a_log_in_use_is_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "proxy.log"
    descriptor = begin_log(path)
    for number in range(1000):
        os.write(descriptor, f"{number:06} {LINE}\n".encode())
    trim_log(path, 2_000_000)
    assert path.stat().st_size > 1_000_000, "it was short enough"
    trim_log(path, 400_000)
    os.write(descriptor, b"after\n")
    os.close(descriptor)
    lines = path.read_text().splitlines()
    assert path.stat().st_size <= 110_000
    assert lines[0] == "(earlier lines were dropped)" and lines[-1] == "after" and lines[-2].startswith("000999")
    assert all(len(line) == 1006 for line in lines[1:-1]), "whole lines"


def test_last_words_are_of_this_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n" * 3)
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("one\n\ntwo\n")
    assert last_lines(log, 5, begin) == "one\ntwo" and last_lines(log, 1) == "two"
    assert last_lines(tmp_path / "none", 5) == ""
