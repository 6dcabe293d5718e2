"""Stored responses: SQLite, bounded in number, bytes and age, readable by this user only."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.core.sizes import as_size
from start_llm.files.database import CacheDatabase, Damaged, FileUnavailable

_SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX responses_used ON responses (used);
"""
_VERSION = 1
MOST_BYTES = 512 << 20  # of all entries, compressed
MOST = 1000
KEPT_SECONDS = 86400.0  # after its last use
_FREE_BYTES = 16 << 20  # of the disk, below which nothing is begun that has to be stored
_LATEST = 1e11  # unix seconds; a time beyond it is damage


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the whole list of input items that led to it, those of earlier responses included."""

    body: dict[str, Any]
    items: list[Any]


class ResponsesStore:
    """Thread-safe; processes may share the file. Every entry is whole in itself: losing an older one breaks nothing.

    `check`, `run` and what `OwnResponses` does raise `FileUnavailable` where the file cannot be used now. A damaged
    file is set aside.

    `path` is made at first use, mode 0600. Of the entries the least recently used go first.
    """

    def __init__(self, path: Path) -> None:
        self._base = CacheDatabase(path, _SCHEMA, _VERSION, what="stored responses", check=False)
        self._since: float | None = None  # what is added to the clock

    def of(self, owner: str | None) -> OwnResponses:
        """The store as `owner` sees it; ``None``: a client that may see nothing again."""
        return OwnResponses(self, owner)

    def run[R](self, act: Callable[[sqlite3.Connection, float], R]) -> R:
        """Does something with what is not too old, in one transaction. It is given the time to write."""
        return self._base.run(lambda database: act(database, self._expire(database)))

    def check(self) -> None:
        """To be asked before work whose result has to be stored. Raises FileUnavailable if it could not be."""
        self._base.run(self._expire)
        free = shutil.disk_usage(self._base.path.parent).free
        if free < _FREE_BYTES:
            raise FileUnavailable(f"stored responses: only {as_size(free)} of the disk are free")

    def close(self) -> None:
        self._base.close()

    def _expire(self, database: sqlite3.Connection) -> float:
        """Drops what is too old. Returns the time to write: unix seconds at the first use, monotonic from there on.

        So a clock that is set while the server runs neither drops everything nor keeps it for ever.
        """
        if self._since is None:
            (last,) = database.execute("SELECT max(used) FROM responses").fetchone()
            if last is not None and not (isinstance(last, float) and 0 <= last < _LATEST):
                raise Damaged(f"the time of an entry, {last!r}")
            self._since = max(time.time(), last or 0.0) - time.monotonic()
        now = self._since + time.monotonic()
        database.execute("DELETE FROM responses WHERE used < ?", (now - KEPT_SECONDS,))
        return now


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The store as one client sees it: what `owner` has stored, ``None``: nothing. Whose it is: `api.http.access`."""

    store: ResponsesStore
    owner: str | None

    @property
    def enabled(self) -> bool:
        return self.owner is not None

    def of_user(self, user: str | None) -> OwnResponses:
        """What `user`, as the client names its own users, has stored with the same key."""
        if self.owner is None or user is None:
            return self
        return OwnResponses(self.store, hashlib.sha256(json.dumps([self.owner, user]).encode()).hexdigest())

    def put(self, body: Mapping[str, Any], items: list[Any]) -> None:
        """Keeps `body` under its ``id``. Only where it is `enabled`."""
        packed = _pack(body), _pack(items)
        size = sum(map(len, packed))
        if size > MOST_BYTES:
            raise FileUnavailable(f"the response takes {size} bytes, and {MOST_BYTES} are kept of all")

        def write(database: sqlite3.Connection, now: float) -> None:
            row = (body["id"], self.owner, now, size, *packed)
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            latest_first = "OVER (ORDER BY used DESC, rowid DESC)"
            database.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id,"
                f" count(*) {latest_first} AS number, sum(size) {latest_first} AS bytes FROM responses)"
                " WHERE number > ? OR bytes > ?)",
                (MOST, MOST_BYTES),
            )

        self.store.run(write)

    def get(self, response_id: str) -> StoredResponse | None:
        def read(database: sqlite3.Connection, now: float) -> StoredResponse | None:
            key = (response_id, self.owner)
            row = database.execute("SELECT body, items FROM responses WHERE id = ? AND owner = ?", key).fetchone()
            if row is None:
                return None
            database.execute("UPDATE responses SET used = ? WHERE id = ?", (now, response_id))
            return _unpack(*row)

        return self.store.run(read) if self.enabled else None

    def delete(self, response_id: str) -> bool:
        def drop(database: sqlite3.Connection, now: float) -> bool:
            query = "DELETE FROM responses WHERE id = ? AND owner = ?"
            return database.execute(query, (response_id, self.owner)).rowcount > 0

        return self.enabled and self.store.run(drop)


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _unpack(body: Any, items: Any) -> StoredResponse:
    """Raises Damaged; zlib's checksum finds changed bytes."""
    try:
        stored = StoredResponse(json.loads(zlib.decompress(body)), json.loads(zlib.decompress(items)))
    except (zlib.error, TypeError, ValueError) as error:
        raise Damaged(f"an entry: {error}") from error
    if not isinstance(stored.body, dict) or not isinstance(stored.items, list):
        raise Damaged("an entry that is no response")
    return stored
