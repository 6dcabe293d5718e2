"""Keeps what was found out about checkpoints, in one SQLite file. Knows no MLX, and finds nothing out; any thread.

A row stands for a checkpoint's files, the libraries that load and render it, and the version of this way of finding
out. A damaged file or row is dropped, and the model is probed again.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from start_llm.files.database import CacheDatabase, Damaged, FileUnavailable
from start_llm.models.capabilities import ProbeResult

FILE = "models.sqlite3"
PROBE_VERSION = 5
"""Raise it when finding out changes: every model is then probed again."""
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers", "jinja2")
_SCHEMA = """
CREATE TABLE models (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, at REAL NOT NULL, record TEXT NOT NULL, sum TEXT NOT NULL)
"""
_MOST_ROWS = 400
_RECORD = TypeAdapter(ProbeResult)


def probe_key(files: str) -> str:
    """The row of a checkpoint. `files`: `fingerprint.fingerprint` of its folder."""
    digest = hashlib.sha256(f"{PROBE_VERSION} {files}".encode())
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f" {library} {version(library)}".encode())
    return digest.hexdigest()


def read_probe(path: Path, key: str) -> ProbeResult | None:
    """What an earlier load found out. ``None``: nothing, or the file cannot be read now. Any thread."""

    def read(connection: sqlite3.Connection) -> ProbeResult | None:
        row = connection.execute("SELECT record, sum FROM models WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        record, checksum = row
        if not isinstance(record, str) or _checksum(key, record) != checksum:
            raise Damaged("a row is not what was written")
        return decode(record)

    return _run(path, read)


def keep_probe(path: Path, key: str, name: str, result: ProbeResult) -> None:
    """A file that cannot be written now is logged once. Any thread."""
    record = encode(result)
    values = (key, name, time.time(), record, _checksum(key, record))

    def write(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT OR REPLACE INTO models (key, name, at, record, sum) VALUES (?, ?, ?, ?, ?)", values)
        newest = "SELECT key FROM models ORDER BY at DESC LIMIT ?"
        connection.execute(f"DELETE FROM models WHERE key NOT IN ({newest})", (_MOST_ROWS,))

    _run(path, write)


def _run[T](path: Path, work: Callable[[sqlite3.Connection], T]) -> T | None:
    with closing(CacheDatabase(path, _SCHEMA, 1, what="what models can do")) as database, suppress(FileUnavailable):
        return database.run(work)
    return None


def encode(result: ProbeResult) -> str:
    return _RECORD.dump_json(result).decode()


def decode(record: str) -> ProbeResult:
    """Raises Damaged."""
    try:
        return _RECORD.validate_json(record)
    except ValidationError as error:
        raise Damaged("a row cannot be read") from error


def _checksum(key: str, record: str) -> str:
    return hashlib.sha256(f"{key} {record}".encode()).hexdigest()
