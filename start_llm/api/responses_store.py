"""Stored responses: SQLite, bounded in number and age, readable by this user only."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, created REAL NOT NULL, used REAL NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the whole list of input items that led to it, those of earlier responses included."""

    body: dict[str, Any]
    items: list[Any]


class ResponsesStore:
    """Thread-safe. Every entry is whole in itself: losing an older one breaks no conversation.

    Args:
        path: made at first use, mode 0600.
        most: entries kept, the least recently used go first; 0 stores nothing.
        ttl: seconds after its last use that an entry is kept; 0 is for ever.
        clock: unix seconds.
    """

    def __init__(self, path: Path, most: int, ttl: float, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._most = most
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def put(self, body: dict[str, Any], items: list[Any]) -> None:
        """Keeps `body` under its ``id``. Raises sqlite3.Error, OSError."""
        if not self.enabled:
            return
        now = self._clock()
        with self._lock, self._open() as database:
            row = (body["id"], now, now, _pack(body), _pack(items))
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)", row)
            self._expire(database, now)
            keep = "SELECT id FROM responses ORDER BY used DESC, rowid DESC LIMIT ?"
            database.execute(f"DELETE FROM responses WHERE id NOT IN ({keep})", (self._most,))

    def get(self, response_id: str) -> Stored | None:
        if not self.enabled:
            return None
        now = self._clock()
        with self._lock, self._open() as database:
            self._expire(database, now)
            with closing(database.execute("SELECT body, items FROM responses WHERE id = ?", (response_id,))) as rows:
                row = rows.fetchone()
            if row is None:
                return None
            database.execute("UPDATE responses SET used = ? WHERE id = ?", (now, response_id))
        return Stored(_unpack(row[0]), _unpack(row[1]))

    def delete(self, response_id: str) -> bool:
        if not self.enabled:
            return False
        with self._lock, self._open() as database:
            return database.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        """The connection, as a transaction; called with the lock held."""
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._path.chmod(0o600)
            self._connection = sqlite3.connect(self._path, check_same_thread=False, timeout=10)
            self._connection.executescript(SCHEMA)
        return self._connection

    def _expire(self, database: sqlite3.Connection, now: float) -> None:
        if self._ttl > 0:
            database.execute("DELETE FROM responses WHERE used < ?", (now - self._ttl,))


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
