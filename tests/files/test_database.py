from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from start_llm.files.batches import BatchWriter
from start_llm.files.database import CacheDatabase, Damaged, FileUnavailable
from tests.files.damage import damage_somewhere
from tests.together import together

SCHEMA = "CREATE TABLE words (word TEXT PRIMARY KEY, data BLOB NOT NULL); CREATE INDEX by_data ON words (data);"


def database(folder: Path, version: int = 1) -> CacheDatabase:
    return CacheDatabase(folder / "sub" / "words.sqlite", SCHEMA, version, what="words", busy_seconds=0.3)


def put(base: CacheDatabase, word: str, data: bytes = b"x") -> None:
    base.run(lambda connection: connection.execute("INSERT OR REPLACE INTO words VALUES (?, ?)", (word, data)))


def words(base: CacheDatabase) -> list[str]:
    return base.run(lambda c: [row[0] for row in c.execute("SELECT word FROM words WHERE data > '' ORDER BY word")])


def filled(folder: Path) -> Path:
    """A file with 200 entries."""
    base = database(folder)
    entries = [(f"w{number:03}", bytes([number]) * 300) for number in range(200)]
    base.run(lambda connection: connection.executemany(INSERT, entries))
    base.close()
    return base.path


def overwritten(path: Path) -> None:
    path.write_bytes(b"no database " * 1000)


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def other_tables(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("DROP INDEX by_data")
    connection.execute("CREATE TRIGGER t AFTER INSERT ON words BEGIN DELETE FROM words; END")
    connection.commit()
    connection.close()


def a_folder_for_the_journal(path: Path) -> None:
    journal = path.with_name(path.name + "-journal")
    journal.unlink(missing_ok=True)
    journal.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 5000),
    "overwritten": overwritten,
    "a folder": in_its_place(lambda path: (path / "inside").mkdir(parents=True)),
    "a loop": in_its_place(lambda path: path.symlink_to(path)),
    "a link to nowhere": in_its_place(lambda path: path.symlink_to(path.parent / "nowhere" / "at all")),
    "a pipe": in_its_place(os.mkfifo),
    "other tables": other_tables,
    "a folder for the journal": a_folder_for_the_journal,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_at_open(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path, damage = filled(tmp_path), DAMAGES[name]
    damage(path)
    base = database(tmp_path)
    put(base, "new")
    assert words(base) == ["new"]
    assert caplog.text.count("is damaged") == 1
    assert os.path.lexists(f"{path}.damaged")
    if damage is other_tables:
        return
    damage(path)  # a second time: one copy is kept, and a running process goes on
    put(base, "newer")
    assert "newer" in words(base)
    base.close()
    put(base, "newest")
    assert "newest" in words(base)


def test_a_file_is_read_through_when_it_is_opened_but_not_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Heard(sqlite3.Connection):
        def execute(self, statement: str, *more: Any) -> sqlite3.Cursor:
            done.append(statement)
            return super().execute(statement, *more)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Heard))
    for times in (0, 1):
        base = database(tmp_path)
        put(base, "a")
        base.close()
        assert sum("quick_check" in statement for statement in done) == times


def test_another_version_is_set_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    assert words(database(tmp_path, version=2)) == []


def test_what_the_function_finds_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = database(tmp_path)
    put(base, "a")

    def read(connection: sqlite3.Connection) -> str:
        if connection.execute("SELECT count(*) FROM words").fetchone()[0]:
            raise Damaged("a is not a word")
        return "nothing there"

    assert base.run(read) == "nothing there"
    assert "a is not a word" in caplog.text
    put(base, "b")
    assert words(base) == ["b"]


def test_a_file_that_is_taken_away_in_use(tmp_path: Path) -> None:
    base = database(tmp_path)
    put(base, "a")
    base.path.unlink()
    put(base, "b")
    assert words(base) == ["b"]


def test_a_full_disk_is_said_once_and_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = database(tmp_path)
    put(base, "a")
    base.run(lambda c: c.execute("PRAGMA max_page_count=5"))
    for _ in range(3):
        # the limit belongs to a connection, and a failure closes it: so it is set in the same transaction
        with pytest.raises(FileUnavailable, match="full"):
            base.run(lambda c: (c.execute("PRAGMA max_page_count=5"), c.execute(INSERT, ("b", bytes(100_000)))))
    assert caplog.text.count("cannot be used now") == 1
    put(base, "c")
    assert "can be used again" in caplog.text
    assert words(base) == ["a", "c"]
    assert not Path(f"{base.path}.damaged").exists()


INSERT = "INSERT INTO words VALUES (?, ?)"


def test_another_process_that_holds_the_lock_is_no_damage(tmp_path: Path) -> None:
    base = database(tmp_path)
    put(base, "a")
    other = sqlite3.connect(base.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(FileUnavailable, match="locked"):
        put(base, "b")
    other.execute("COMMIT")
    other.close()
    put(base, "b")
    assert words(base) == ["a", "b"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "sub").write_text("a file")
    base = database(tmp_path)
    with pytest.raises(FileUnavailable, match="sub"):
        put(base, "a")
    (tmp_path / "sub").unlink()
    put(base, "a")


def test_mistakes_of_the_caller_are_not_hidden(tmp_path: Path) -> None:
    base = database(tmp_path)
    put(base, "a")
    with pytest.raises(sqlite3.ProgrammingError):
        base.run(lambda c: c.execute(INSERT, ("b",)))

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute(INSERT, ("b", b""))
        raise KeyError("mine")

    with pytest.raises(KeyError):
        base.run(fail)
    assert words(base) == ["a"]


def test_a_query_that_can_never_work_ends(tmp_path: Path) -> None:
    with pytest.raises(FileUnavailable, match="no such table"):
        database(tmp_path).run(lambda c: c.execute("SELECT * FROM missing"))


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_random_damages(tmp_path: Path, count: int) -> None:
    kept = {path.name: path.read_bytes() for path in filled(tmp_path).parent.iterdir()}
    chance = random.Random(1)
    for number in range(count):
        folder = tmp_path / str(number)
        (folder / "sub").mkdir(parents=True)
        for name, data in kept.items():
            (folder / "sub" / name).write_bytes(data)
        damage_somewhere(folder / "sub", chance)
        base = database(folder)
        works(base)
        damage_somewhere(folder / "sub", chance)
        works(base)
        base.close()
        base = database(folder)
        works(base)
        base.close()


def works(base: CacheDatabase) -> None:
    """Nothing is raised; once all of it was read, and damage thus found, what is written stays."""
    put(base, "first")
    words(base)
    put(base, "second")
    assert "second" in words(base)


PROGRAM = f"""
import sys
from pathlib import Path
from start_llm.files.database import CacheDatabase
base = CacheDatabase(Path(sys.argv[1]), {SCHEMA!r}, 1, what="words", busy_seconds=60)
for number in range(25):
    row = (f"{{sys.argv[2]}}-{{number}}", b"y" * 1000)
    base.run(lambda connection: connection.execute("INSERT OR REPLACE INTO words VALUES (?, ?)", row))
"""


@pytest.mark.live
def test_processes_and_threads_share_a_file(tmp_path: Path) -> None:
    base = CacheDatabase(tmp_path / "sub" / "words.sqlite", SCHEMA, 1, what="words", busy_seconds=60)
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(base.path), name]) for name in "ab"]
    together(lambda name=name: [put(base, f"{name}-{number}") for number in range(25)] for name in "cd")
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(words(base)) == 4 * 25


@pytest.mark.live
def test_processes_agree_on_a_damaged_file(tmp_path: Path) -> None:
    path = filled(tmp_path)
    overwritten(path)
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), name]) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(words(database(tmp_path))) == 2 * 25


# --- writing in batches on a thread of its own ---


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., BatchWriter[Any]]:
    """A writer whose batches go to a function."""

    def begun(take: Callable[[list[Any]], object], gather_seconds: float = 0.0) -> BatchWriter[Any]:
        database = CacheDatabase(tmp_path / "file", "CREATE TABLE numbers (number INTEGER)", 1, what="test")
        return BatchWriter("its name", database, lambda connection, items: take(items), gather_seconds)

    return begun


def test_everything_is_written_in_its_order_in_few_batches_by_one_thread(begin):
    batches: list[list[int]] = []
    names: list[str] = []
    writer = begin(
        lambda batch: (batches.append(batch), names.append(threading.current_thread().name)), gather_seconds=60.0
    )
    for number in range(100):
        writer.put(number)
    writer.close()  # waits for no gathering
    assert [number for batch in batches for number in batch] == list(range(100))
    assert len(batches) <= 3 and {*names} == {"its name"}


def test_flush_waits_for_what_was_put_before_and_nothing_is_taken_after_close(begin):
    seen: list[str] = []
    writer = begin(seen.extend)
    writer.put("one")
    writer.flush()
    assert seen == ["one"]
    writer.flush()  # nothing is waiting
    writer.close()
    writer.close()
    writer.put("late")
    writer.flush()
    assert seen == ["one"]


def test_after_a_batch_that_goes_wrong_the_next_one_is_written(begin, caplog):
    seen: list[float] = []
    writer = begin(lambda batch: seen.extend(1 / number for number in batch))
    for number in (0, 2):
        writer.put(number)
        writer.flush()
    writer.close()
    assert seen == [0.5] and "test: 1 rows could not be written (division by zero)" in caplog.text
