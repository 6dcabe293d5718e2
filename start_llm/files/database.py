"""A SQLite file that is a cache: whatever happens to it, the program goes on.

- Nothing is opened before the first `run`. Each `run` is one transaction. Use its connection inside the function only,
  and fetch and decode everything there.
- **Damage**, found by SQLite or by the function (it raises `Damaged`): the file is renamed to ``NAME.damaged``, a new
  one is begun, a warning is logged, and the function runs once more on the new, empty file. So it must have no effect
  outside the transaction until it returns.
- **What is not the file's fault** (disk full, read-only, locked by another process, no free descriptor): the file stays
  as it is and `run` raises `FileUnavailable`. That is logged once, until a later `run` succeeds. Go on without the
  file, or tell the client; each `run` tries again.
- Mistakes of the caller (a wrong number of parameters, an exception of the function) come through as they are, after a
  rollback.
- Raise `version` when the meaning of the content changes. Another version or another schema counts as damage.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from start_llm.core.errors import Explained
from start_llm.files.atomic import remove_anything
from start_llm.files.locks import locked

log = logging.getLogger(__name__)

_SIDES = ("-wal", "-shm", "-journal")
_KINDS = "PERM BUSY LOCKED NOMEM READONLY INTERRUPT IOERR FULL CANTOPEN PROTOCOL TOOBIG NOLFS"
_NOT_THE_FILE = {getattr(sqlite3, f"SQLITE_{kind}") for kind in _KINDS.split()}
_UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}


class Damaged(Exception):
    """Raised inside `CacheDatabase.run` by a function that finds content that cannot be right."""


class FileUnavailable(Explained):
    """The file cannot be used now, through no fault of its content; the message says why."""


# SQLite's messages quote the file: from a damaged one they may be no UTF-8.
_FAILURES = (sqlite3.Error, OSError, Damaged, UnicodeDecodeError)


class CacheDatabase:
    """See the module's text. Thread-safe: one `run` at a time, from any thread. Processes may share a file.

    Args:
        path: made at the first `run`, mode 0600, missing folders 0700.
        schema: SQL that makes the tables of an empty file.
        version: of the content's meaning, at least 1.
        what: what is kept, for log lines: "stored responses".
        check: look through the whole file when it is opened (about 1 s for each GB).
        busy_seconds: how long a `run` waits for another process.
    """

    def __init__(
        self, path: Path, schema: str, version: int, *, what: str, check: bool = True, busy_seconds: float = 5.0
    ) -> None:
        self.path = path
        self._statements = [statement for part in schema.split(";") if (statement := part.strip())]
        self._version = version
        self.what = what
        self._check = check
        self._busy_seconds = busy_seconds
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was opened last
        self._failing = False

    def run[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Calls `work` within a transaction. Returns what it returns. Raises FileUnavailable: see the module's text."""
        with self._lock:
            try:
                result = self._twice(work)
            except sqlite3.ProgrammingError:
                raise
            except _FAILURES as error:
                raise self._unavailable(error) from error
            if self._failing:
                self._failing = False
                log.warning("%s: %s can be used again", self.what, self.path)
            return result

    def close(self) -> None:
        """Lets go of the file. A later `run` opens it again."""
        with self._lock:
            self._disconnect()

    # --- with the lock held ---------------------------------------------------

    def _twice[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        """A second time if the first could have failed because of the file; on a new one if that is damaged."""
        opened_before = self._connection is not None
        try:
            return self._attempt(work)
        except sqlite3.ProgrammingError:
            raise
        except _FAILURES as error:
            if _is_damage(error):
                self._begin_afresh(error)
            elif not opened_before or _code(error) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL}:
                raise
        return self._attempt(work)

    def _attempt[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with _transaction(self._connect()) as connection:
                return work(connection)
        except _FAILURES:
            self._disconnect()  # the next try begins with a look at the file
            raise

    def _connect(self) -> sqlite3.Connection:
        if self._connection is not None:
            if _identity(self.path) == self._identity:
                return self._connection
            log.warning("%s: %s was taken away and is begun afresh", self.what, self.path)
            self._disconnect()
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Nobody else opens or sets aside a file of this folder meanwhile: a process could write a journal for the
        # damaged database, and another take it for that of the new one.
        with locked(self.path.parent, self._busy_seconds):
            # One that is there must not be opened and closed here: that would end the locks which SQLite holds on it
            # elsewhere in this process.
            if new := not os.path.lexists(self.path):
                self.path.touch(0o600, exist_ok=False)
            self._identity = _identity(self.path)
            for side in ("", *_SIDES):
                _claim(_beside(self.path, side))
            connection = sqlite3.connect(
                self.path, timeout=self._busy_seconds, check_same_thread=False, isolation_level=None
            )
            try:
                self._prepare(connection, new)
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection, new: bool) -> None:
        """Settings, and the tables where they are missing. Raises where the file is not what this program writes."""
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        connection.execute("PRAGMA synchronous=NORMAL")
        # No memory-mapped file, and so no write-ahead log: if one is cut short in use, the process ends with SIGBUS.
        connection.execute("PRAGMA mmap_size=0")
        mode = connection.execute("PRAGMA journal_mode=TRUNCATE").fetchone()[0]
        if mode != "truncate":
            raise Damaged(f"its journal mode is {mode}")
        with _transaction(connection):
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and not _objects(connection):
                for statement in self._statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={self._version}")
            elif version != self._version:
                raise Damaged(f"it is of version {version}, not {self._version}")
        if _objects(connection) != self._expected():
            raise Damaged("its tables are not those that were made")
        if self._check and not new:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise Damaged(str(found))

    def _expected(self) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(":memory:")) as empty:
            for statement in self._statements:
                empty.execute(statement)
            return _objects(empty)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _begin_afresh(self, why: Exception) -> None:
        """Sets the file aside, where no other process has done so already. Raises OSError: it cannot be set aside."""
        self._disconnect()
        with locked(self.path.parent, self._busy_seconds):
            if _identity(self.path) != self._identity:
                return
            aside = _beside(self.path, ".damaged")
            for gone in (aside, *(_beside(self.path, side) for side in _SIDES)):
                remove_anything(gone)
            os.replace(self.path, aside)
        reason = " ".join(str(why).split())
        log.warning("%s: %s is damaged (%s); it is set aside as %s", self.what, self.path, reason, aside.name)

    def _unavailable(self, error: Exception) -> FileUnavailable:
        message = f"{self.what}: {self.path} cannot be used now: {error}"
        if not self._failing:
            self._failing = True
            log.warning("%s (said once)", message)
        return FileUnavailable(message)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _is_damage(error: Exception) -> bool:
    """Whether the file is to blame, and not the disk, the system or the caller."""
    if isinstance(error, OSError):
        return error.errno == errno.ELOOP
    code = _code(error)
    return code in _UNREADABLE or (code & 0xFF) not in _NOT_THE_FILE


def _code(error: Exception) -> int:
    """SQLite's extended code; 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0))


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what has this name now; ``None`` if nothing has."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _claim(path: Path) -> None:
    """Raises `Damaged` if a thing that is no file has this name. Makes a file its owner's only."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise Damaged(f"{path.name} is a link to nothing") from None
        return
    if not stat.S_ISREG(mode):
        raise Damaged(f"{path.name} is no file")
    if stat.S_IMODE(mode) != 0o600:
        with suppress(OSError):
            path.chmod(0o600)


def _objects(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    """Every table, index, view and trigger with its SQL."""
    rows = connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master").fetchall()
    return sorted(tuple(str(value) for value in row) for row in rows)
