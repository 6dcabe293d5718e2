"""Turn records, healing and tool lists on disk, so that they survive a restart.

One SQLite file in WAL mode, written by one thread, off the request path: a kill loses at most what was not yet written.
Records belong to a fingerprint (template and tokenizer); others are left alone until they age out.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from start_llm.prompt.heal import CAPACITY, Healed
from start_llm.prompt.turncodec import DamagedRecord, decode, encode
from start_llm.prompt.turns import Record

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, blob BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS healing (
    parent BLOB NOT NULL, key BLOB NOT NULL, entry TEXT NOT NULL, PRIMARY KEY (parent, key));
CREATE TABLE IF NOT EXISTS toollists (names TEXT PRIMARY KEY);
"""
_GATHER_SECONDS = 0.2


@dataclass(slots=True)
class Stored:
    """What was found on disk, oldest first."""

    records: list[tuple[int, Record]] = field(default_factory=list)
    healing: list[tuple[bytes, bytes, Healed]] = field(default_factory=list)
    toollists: list[tuple[str, ...]] = field(default_factory=list)
    next_id: int = 0


_Write = Callable[[sqlite3.Connection], None]


class TurnDB:
    """The file. `save_*` may be called from any thread and return at once; `load` once, before them."""

    def __init__(self, path: Path, *, limit_bytes: int = 256 * 2**20, load_bytes: int = 128 * 2**20) -> None:
        """Opens or makes the file (0600, its folder 0700); a file that SQLite cannot read is set aside.

        Raises:
            OSError, sqlite3.Error: it can neither be opened nor replaced.
        """
        self._path = path
        self._limit = limit_bytes
        self._load_limit = load_bytes
        self._fingerprint = ""
        self.failures = 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._connect().close()
        except sqlite3.DatabaseError as error:
            log.warning("turn records: %s cannot be read (%s); it is set aside and a new one begun", path, error)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            path.replace(path.with_name(path.name + ".damaged"))
            self._connect().close()
        self._records: dict[int, Record | None] = {}
        self._writes: SimpleQueue[_Write | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turndb", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self._path, timeout=10)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.executescript(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def load(self, fingerprint: str) -> Stored:
        """Reads what belongs to `fingerprint`, the newest up to the byte limit; damaged rows are dropped and logged."""
        self._fingerprint = fingerprint
        stored = Stored()
        connection = self._connect()
        try:
            used = 0
            rows = connection.execute(
                "SELECT id, blob FROM records WHERE fingerprint=? ORDER BY id DESC", (fingerprint,)
            )
            for record_id, blob in rows:
                try:
                    record = decode(blob)
                except DamagedRecord as error:
                    log.warning("turn records: record %d is damaged (%s); it is dropped", record_id, error)
                    self._submit(_delete([record_id]))
                    continue
                used += record.size
                if used > self._load_limit:
                    break
                stored.records.append((record_id, record))
            stored.records.reverse()
            rows = connection.execute("SELECT parent, key, entry FROM healing ORDER BY rowid")
            for parent, key, entry in rows:
                content, reasoning, arguments, *names = json.loads(entry)
                healed = Healed(content, reasoning, tuple(arguments), tuple(names[0]) if names else ())
                stored.healing.append((parent, key, healed))
            rows = connection.execute("SELECT names FROM toollists ORDER BY rowid")
            stored.toollists = [tuple(json.loads(names)) for (names,) in rows]
            (last,) = connection.execute("SELECT MAX(id) FROM records").fetchone()
            stored.next_id = 0 if last is None else last + 1
        finally:
            connection.close()
        return stored

    def save_record(self, record_id: int, record: Record, gone: list[int]) -> None:
        """Writes a record and deletes those it replaced; one that is replaced before that is never written."""
        with self._lock:
            first = not self._records
            for old in gone:
                self._records[old] = None
            self._records[record_id] = record
        if first:
            self._submit(self._write_records)

    def save_healing(self, parent: bytes, key: bytes, entry: Healed) -> None:
        row = (parent, key, json.dumps([entry.content, entry.reasoning, entry.arguments, entry.names]))
        self._submit(lambda connection: _put_healing(connection, row))

    def save_tools(self, names: tuple[str, ...]) -> None:
        self._submit(
            lambda connection: _execute(connection, "INSERT OR IGNORE INTO toollists VALUES (?)", (json.dumps(names),))
        )

    def close(self) -> None:
        """Writes what is waiting and ends the thread."""
        if not self._closing.is_set():
            self._closing.set()
            self._writes.put(None)
            self._thread.join()

    def flush(self) -> None:
        """Returns when all that was saved before is on disk."""
        done = threading.Event()
        if not self._closing.is_set():
            self._writes.put(done)
            done.wait()

    # --- the writer thread --------------------------------------------------

    def _submit(self, write: _Write) -> None:
        if not self._closing.is_set():
            self._writes.put(write)

    def _run(self) -> None:
        connection = self._connect()
        try:
            while (write := self._writes.get()) is not None:
                self._batch(connection, write)
        finally:
            connection.close()

    def _batch(self, connection: sqlite3.Connection, first: _Write | threading.Event) -> None:
        """One transaction with everything that waits, after a moment for more."""
        writes = [first]
        self._closing.wait(_GATHER_SECONDS)
        ended = False
        while True:
            try:
                write = self._writes.get_nowait()
            except Empty:
                break
            if write is None:
                ended = True
                break
            writes.append(write)
        try:
            with connection:
                for write in writes:
                    if not isinstance(write, threading.Event):
                        write(connection)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the next batch may do better
            self.failures += 1
            log.warning("turn records: %d writes failed (%s)", len(writes), error)
        for write in writes:
            if isinstance(write, threading.Event):
                write.set()
        if ended:
            self._writes.put(None)

    def _write_records(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            waiting, self._records = self._records, {}
        _delete([record_id for record_id, record in waiting.items() if record is None])(connection)
        for record_id, record in waiting.items():
            if record is not None:
                row = (record_id, self._fingerprint, encode(record))
                connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
        (used,) = connection.execute("SELECT TOTAL(LENGTH(blob)) FROM records").fetchone()
        while used > self._limit:
            row = connection.execute("SELECT id, LENGTH(blob) FROM records ORDER BY id LIMIT 1").fetchone()
            _delete([row[0]])(connection)
            used -= row[1]


def _execute(connection: sqlite3.Connection, statement: str, row: tuple[object, ...]) -> None:
    connection.execute(statement, row)


def _delete(ids: list[int]) -> _Write:
    def write(connection: sqlite3.Connection) -> None:
        connection.executemany("DELETE FROM records WHERE id=?", [(record_id,) for record_id in ids])

    return write


def _put_healing(connection: sqlite3.Connection, row: tuple[object, ...]) -> None:
    connection.execute("INSERT OR REPLACE INTO healing VALUES (?, ?, ?)", row)
    (last,) = connection.execute("SELECT MAX(rowid) FROM healing").fetchone()
    connection.execute("DELETE FROM healing WHERE rowid <= ?", (last - CAPACITY,))
