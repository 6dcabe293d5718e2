"""A lock that the system drops when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link or a pipe in a lock's place leads nowhere else, and holds nobody up."""


class ProcessLock:
    """An exclusive lock on a file of one's own. One holder at a time; not for threads of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """By this object."""
        return self._file is not None

    def take(self) -> bool:
        """False if somebody else holds it. The folder is made (0700). Raises OSError."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            if self._is_in_place(file):
                self._file = file
                return True
            os.close(file)  # a holder that ended has removed the file in the meantime: this lock is nobody's

    def drop(self) -> None:
        """Removes the file, too. Does nothing if the lock is not held."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock now. A holder that begins in this moment may be told that it is held."""
    try:
        file = os.open(path, os.O_RDONLY | _SAFE)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
