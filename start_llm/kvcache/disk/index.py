"""The SQLite index of the disk tier: which file holds the KV of which prefix. Opens none of these files.

A row names a run of tokens by the hash chain at its end and points to its parent's. A file may serve several rows: a
run that was divided later is found in parts of one file.

Every row carries a checksum, because SQLite has none: a changed bit in `tokens` or `first` would make the store serve
the KV of other tokens. A row that does not match it, or a file name that this program would not have made, means that
the whole index is damaged.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from start_llm.files.database import CacheDatabase, Damaged

SUFFIX = ".safetensors"

_NAME = re.compile(r"(?:r[0-9]{1,12}|c)-[0-9a-f]{64}\.safetensors")
_TOKEN = 4  # bytes
_VERSION = 2

_SCHEMA = """
CREATE TABLE files (name TEXT PRIMARY KEY, bytes INTEGER, sha256 BLOB, meta TEXT, checksum BLOB);
CREATE TABLE runs (
    digest BLOB PRIMARY KEY, parent BLOB, start INTEGER, tokens BLOB, file TEXT, first INTEGER, seconds REAL,
    checksum BLOB, used INTEGER
);
CREATE INDEX runs_by_parent ON runs (parent);
CREATE INDEX runs_by_file ON runs (file);
CREATE INDEX runs_by_use ON runs (used);
CREATE TABLE checkpoints (digest BLOB PRIMARY KEY, file TEXT);
CREATE INDEX checkpoints_by_file ON checkpoints (file);
"""
_RUN_COLUMNS = "digest, parent, start, tokens, file, first, seconds, checksum"


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of tokens whose rows are on disk.

    Attributes:
        digest: hash chain at its end.
        parent: hash chain at its start.
        start: offset of its first token.
        tokens: int32, little endian.
        file, first: its rows begin at row `first` of this file.
        seconds: measured cost a token.
    """

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    file: str
    first: int = 0
    seconds: float = 0.0

    def checksum(self) -> bytes:
        return _checksum(self.digest, self.parent, self.start, self.tokens, self.file, self.first, self.seconds)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written; `meta` is what `LayerKit.unpack` needs."""

    name: str
    nbytes: int
    sha256: bytes
    meta: str

    def checksum(self) -> bytes:
        return _checksum(self.name, self.nbytes, self.sha256, self.meta)


@dataclass(frozen=True, slots=True)
class IndexContent:
    """Everything that the index holds: runs, parents first, and the checkpoint files by digest."""

    files: dict[str, FileRecord]
    runs: list[TokenRun]
    checkpoints: dict[bytes, str]


def run_file(run: TokenRun) -> str:
    return f"r{run.start}-{run.digest.hex()}{SUFFIX}"


def checkpoint_file(digest: bytes) -> str:
    return f"c-{digest.hex()}{SUFFIX}"


def is_file_name(name: object) -> bool:
    """Whether this program could have given a file of stored KV this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class DiskIndex:
    """Opened at the first call. Damage begins an empty index, see `CacheDatabase`: then `generation` grows.

    Every method raises `FileUnavailable` where the index cannot be used now.
    """

    def __init__(self, path: Path) -> None:
        self._base = CacheDatabase(path, _SCHEMA, _VERSION, what="the index of stored KV")
        self._uses = 0  # a count, not a time: it orders uses whatever the clock does

    @property
    def generation(self) -> int:
        return self._base.generation

    def close(self) -> None:
        self._base.close()

    def load(self) -> IndexContent:
        """Everything, checked."""

        def read(db: sqlite3.Connection) -> tuple[IndexContent, int]:
            files = [_file(row) for row in db.execute("SELECT name, bytes, sha256, meta, checksum FROM files")]
            runs = [_run(row) for row in db.execute(f"SELECT {_RUN_COLUMNS} FROM runs ORDER BY start")]
            checkpoints = {}
            for digest, name in db.execute("SELECT digest, file FROM checkpoints"):
                if not isinstance(digest, bytes) or name != checkpoint_file(digest):
                    raise Damaged(f"a checkpoint in {name!r}")
                checkpoints[digest] = name
            (last,) = db.execute("SELECT max(used) FROM runs").fetchone()
            return IndexContent({file.name: file for file in files}, runs, checkpoints), last

        content, last = self._base.run(read)
        self._uses = last if isinstance(last, int) else 0
        return content

    def add_run(self, run: TokenRun, file: FileRecord) -> None:
        self._uses += 1

        def write(db: sqlite3.Connection) -> None:
            _put_file(db, file)
            _put_run(db, run, self._uses)

        self._base.run(write)

    def add_checkpoint(self, digest: bytes, file: FileRecord) -> None:
        def write(db: sqlite3.Connection) -> None:
            _put_file(db, file)
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (digest, file.name))

        self._base.run(write)

    def split(self, digest: bytes, upper: bytes, at: int) -> None:
        """Divides the run that ends at `digest` after `at` of its tokens; `upper` is the hash chain there."""

        def write(db: sqlite3.Connection) -> None:
            row = db.execute(f"SELECT {_RUN_COLUMNS}, used FROM runs WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                return
            run, cut = _run(row[:-1]), at * _TOKEN
            if not 0 < cut < len(run.tokens):
                raise Damaged(f"a run of {len(run.tokens) // _TOKEN} tokens that was divided at {at}")
            below = replace(run, parent=upper, start=run.start + at, tokens=run.tokens[cut:], first=run.first + at)
            _put_run(db, replace(run, digest=upper, tokens=run.tokens[:cut]), row[-1])
            _put_run(db, below, row[-1])

        self._base.run(write)

    def touch(self, files: Iterable[str]) -> None:
        """The runs in these files were used last of all."""
        self._uses += 1
        rows = [(self._uses, name) for name in files]
        self._base.run(lambda db: db.executemany("UPDATE runs SET used = ? WHERE file = ?", rows))

    def drop_oldest(self) -> list[str] | None:
        """Removes the longest unused run that no other continues; see `drop_runs`. ``None``: there is none."""

        def write(db: sqlite3.Connection) -> list[str] | None:
            row = db.execute(
                "SELECT digest FROM runs r WHERE NOT EXISTS (SELECT 1 FROM runs c WHERE c.parent = r.digest)"
                " ORDER BY used, start DESC LIMIT 1"
            ).fetchone()
            return None if row is None else _drop_unused(db, _drop_run(db, row[0]))

        return self._base.run(write)

    def drop_runs(self, digests: Iterable[bytes]) -> list[str]:
        """Removes runs and their checkpoints. Returns the files that nothing refers to any more."""
        wanted = list(digests)
        return self._base.run(lambda db: _drop_unused(db, [n for digest in wanted for n in _drop_run(db, digest)]))

    def drop_files(self, files: Iterable[str]) -> list[str]:
        """Removes files and all that stands on them: their runs, what continues these, their checkpoints."""
        wanted = list(files)

        def write(db: sqlite3.Connection) -> list[str]:
            names: list[str] = []
            todo: list[bytes] = []
            for name in wanted:
                db.execute("DELETE FROM checkpoints WHERE file = ?", (name,))
                todo += _column(db, "SELECT digest FROM runs WHERE file = ?", name)
            while todo:
                digest = todo.pop()
                names += _drop_run(db, digest)
                todo += _column(db, "SELECT digest FROM runs WHERE parent = ?", digest)
            gone = _drop_unused(db, names)
            db.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in wanted])
            return list(dict.fromkeys([*gone, *wanted]))

        return self._base.run(write)


def _checksum(*values: Any) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        total.update(b"%d:" % len(data))
        total.update(data)
    return total.digest()


def _file(row: tuple[Any, ...]) -> FileRecord:
    *values, checksum = row
    file = FileRecord(*values)
    if not is_file_name(file.name) or checksum != file.checksum():
        raise Damaged(f"the entry of file {file.name!r}")
    return file


def _run(row: tuple[Any, ...]) -> TokenRun:
    *values, checksum = row
    run = TokenRun(*values)
    if not is_file_name(run.file) or checksum != run.checksum() or not run.tokens or len(run.tokens) % _TOKEN:
        raise Damaged(f"the entry of a run in {run.file!r}")
    return run


def _put_file(db: sqlite3.Connection, file: FileRecord) -> None:
    row = (file.name, file.nbytes, file.sha256, file.meta, file.checksum())
    db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", row)


def _put_run(db: sqlite3.Connection, run: TokenRun, used: int) -> None:
    row = (run.digest, run.parent, run.start, run.tokens, run.file, run.first, run.seconds, run.checksum(), used)
    db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _drop_run(db: sqlite3.Connection, digest: bytes) -> list[str]:
    """Removes a run and its checkpoint. Returns the files that they were in, used elsewhere or not."""
    names = _column(db, "SELECT file FROM runs WHERE digest = ?", digest)
    names += _column(db, "SELECT file FROM checkpoints WHERE digest = ?", digest)
    db.execute("DELETE FROM runs WHERE digest = ?", (digest,))
    db.execute("DELETE FROM checkpoints WHERE digest = ?", (digest,))
    return names


def _drop_unused(db: sqlite3.Connection, names: Iterable[str]) -> list[str]:
    used = "SELECT 1 FROM runs WHERE file = ? UNION ALL SELECT 1 FROM checkpoints WHERE file = ? LIMIT 1"
    unused = [name for name in dict.fromkeys(names) if db.execute(used, (name, name)).fetchone() is None]
    for name in unused:
        if not is_file_name(name):
            raise Damaged(f"the file name {name!r}")
    db.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in unused])
    return unused


def _column(db: sqlite3.Connection, query: str, value: Any) -> list[Any]:
    return [row[0] for row in db.execute(query, (value,))]
