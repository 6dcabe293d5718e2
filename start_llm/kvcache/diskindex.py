"""The SQLite index of the disk tier: which file holds the KV of which prefix. Knows no files and no KV.

A row names a run of tokens by the hash chain at its end and points to its parent's. A file may serve
several rows: a run that was divided later is found in parts of one file. Used by one thread at a time.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

_VERSION = 1

_SCHEMA = """
CREATE TABLE files (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, sha256 BLOB NOT NULL, meta TEXT NOT NULL);
CREATE TABLE runs (
    digest BLOB PRIMARY KEY, parent BLOB NOT NULL, start INTEGER NOT NULL, tokens BLOB NOT NULL,
    file TEXT NOT NULL, first INTEGER NOT NULL, seconds REAL NOT NULL, used REAL NOT NULL
);
CREATE INDEX runs_by_parent ON runs (parent);
CREATE INDEX runs_by_file ON runs (file);
CREATE INDEX runs_by_use ON runs (used);
CREATE TABLE checkpoints (digest BLOB PRIMARY KEY, file TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of tokens whose rows are on disk.

    Attributes:
        digest: hash chain at its end.
        parent: hash chain at its start.
        start: offset of its first token.
        tokens: int32, little endian.
        file, first: its rows begin at row `first` of this file.
        seconds: measured cost a token.
        used: unix time of the last use.
    """

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    file: str
    first: int = 0
    seconds: float = 0.0
    used: float = 0.0


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written; `meta` is what `LayerKit.unpack` needs."""

    name: str
    nbytes: int
    sha256: bytes
    meta: str


class DiskIndex:
    """Raises sqlite3.DatabaseError where the file is no usable index."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"index version {version}, not {_VERSION}")
            self._db.execute("SELECT count(*) FROM runs").fetchone()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def files(self) -> list[FileRecord]:
        return [FileRecord(*row) for row in self._db.execute("SELECT name, bytes, sha256, meta FROM files")]

    def runs(self) -> list[Run]:
        """All runs, parents before their children."""
        columns = "digest, parent, start, tokens, file, first, seconds, used"
        return [Run(*row) for row in self._db.execute(f"SELECT {columns} FROM runs ORDER BY start")]

    def checkpoints(self) -> dict[bytes, str]:
        """File by digest."""
        return dict(self._db.execute("SELECT digest, file FROM checkpoints"))

    def add_run(self, run: Run, file: FileRecord) -> None:
        with self._transaction():
            self._add_file(file)
            self._db.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (run.digest, run.parent, run.start, run.tokens, run.file, run.first, run.seconds, run.used),
            )

    def add_checkpoint(self, digest: bytes, file: FileRecord) -> None:
        with self._transaction():
            self._add_file(file)
            self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (digest, file.name))

    def split(self, digest: bytes, upper: bytes, at: int) -> None:
        """Divides the run that ends at `digest` after `at` of its tokens; `upper` is the hash chain there."""
        with self._transaction():
            row = self._db.execute(
                "SELECT parent, start, tokens, file, first, seconds, used FROM runs WHERE digest = ?", (digest,)
            ).fetchone()
            if row is None:
                return
            parent, start, tokens, file, first, seconds, used = row
            self._db.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (upper, parent, start, tokens[: at * 4], file, first, seconds, used),
            )
            self._db.execute(
                "UPDATE runs SET parent = ?, start = ?, tokens = ?, first = ? WHERE digest = ?",
                (upper, start + at, tokens[at * 4 :], first + at, digest),
            )

    def touch(self, files: tuple[str, ...], used: float) -> None:
        with self._transaction():
            self._db.executemany("UPDATE runs SET used = ? WHERE file = ?", [(used, name) for name in files])

    def oldest_leaf(self) -> bytes | None:
        """The longest unused run that no other run continues."""
        row = self._db.execute(
            "SELECT digest FROM runs r WHERE NOT EXISTS (SELECT 1 FROM runs c WHERE c.parent = r.digest)"
            " ORDER BY used, start DESC LIMIT 1"
        ).fetchone()
        return None if row is None else row[0]

    def drop_run(self, digest: bytes) -> list[str]:
        """Removes a run and its checkpoint. Returns the files that nothing refers to any more."""
        with self._transaction():
            names = self._names("SELECT file FROM runs WHERE digest = ?", digest)
            names += self._names("SELECT file FROM checkpoints WHERE digest = ?", digest)
            self._db.execute("DELETE FROM runs WHERE digest = ?", (digest,))
            self._db.execute("DELETE FROM checkpoints WHERE digest = ?", (digest,))
            return self._drop_unused(names)

    def drop_file(self, name: str) -> list[str]:
        """Removes a file and all that stands on it: its runs, what continues them, their checkpoints."""
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints WHERE file = ?", (name,))
            todo = [row[0] for row in self._db.execute("SELECT digest FROM runs WHERE file = ?", (name,))]
        names = []
        while todo:
            digest = todo.pop()
            todo += [row[0] for row in self._db.execute("SELECT digest FROM runs WHERE parent = ?", (digest,))]
            names += self.drop_run(digest)
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE name = ?", (name,))
        return list(dict.fromkeys([*names, name]))

    def _names(self, query: str, digest: bytes) -> list[str]:
        return [row[0] for row in self._db.execute(query, (digest,))]

    def _drop_unused(self, names: list[str]) -> list[str]:
        used = "SELECT 1 FROM runs WHERE file = ? UNION ALL SELECT 1 FROM checkpoints WHERE file = ? LIMIT 1"
        unused = [name for name in names if self._db.execute(used, (name, name)).fetchone() is None]
        self._db.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in unused])
        return unused

    def _add_file(self, file: FileRecord) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (file.name, file.nbytes, file.sha256, file.meta)
        )

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN ... COMMIT, or ROLLBACK when the block raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
