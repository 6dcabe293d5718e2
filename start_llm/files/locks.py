"""Locks on files and folders, between processes. The system drops one when its holder ends, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link or a pipe in a lock's place leads nowhere else, and holds nobody up."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class FileLock:
    """A lock on a file of its own, or on a folder. Two objects are two holders; not for threads that share one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """By this object."""
        return self._file is not None

    def take(self, seconds: float = 0, *, shared: bool = False) -> bool:
        """False if somebody else holds it for `seconds` more. The file and its folder (0700) are made. Raises OSError:
        there is no place for the file, or the file system has no locks."""
        until = time.monotonic() + seconds
        while not self._try((fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB):
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    def share(self) -> None:
        """From now on others may hold it, too, who share it."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def stands(self) -> bool:
        """Whether it is held, and on what has the path's name now."""
        return self._file is not None and self._is_at_path(self._file)

    def drop(self) -> None:
        """Removes the file, too; a folder stays. Does nothing if the lock is not held."""
        if self._file is not None:
            with suppress(OSError):
                if self.stands() and self._path.is_file():
                    self._path.unlink()
            os.close(self._file)
            self._file = None

    def _try(self, operation: int) -> bool:
        file = self._open()
        try:
            fcntl.flock(file, operation)
            if self._is_at_path(file):
                self._file = file
                return True
        except BlockingIOError:
            return False
        finally:
            if self._file != file:
                os.close(file)
        return self._try(operation)  # a holder that ended has removed the file meanwhile: that lock is nobody's

    def _open(self) -> int:
        if self._path.is_dir():
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)

    def _is_at_path(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Nobody else holds the lock in this block, where the file system has locks. Raises TimeoutError: somebody held it
    for longer than `seconds`; OSError: there is no place for the file."""
    lock = FileLock(path)
    try:
        if not lock.take(seconds):
            raise TimeoutError(errno.ETIMEDOUT, "locked by another process", str(path))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.drop()


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
