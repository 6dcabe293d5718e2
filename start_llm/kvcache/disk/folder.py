"""The folder of one model's stored KV: its files, and the index that says what is in them.

A file is written under a temporary name, synced, renamed, and only then entered in the index with its SHA-256. So
whatever is killed when, the index names whole files only, and what does not match its checksum is never served.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from start_llm.files.atomic import UNFINISHED, write_atomic
from start_llm.files.locks import FileLock
from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.disk.index import SUFFIX, DiskIndex, FileRecord, IndexContent, is_file_name

log = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_RESERVE = 1 << 30  # most bytes of disk that are left to others


class FolderTaken(Exception):
    """Another process uses the folder."""


class DiskFolder:
    """An open folder. Disk thread only, but for `record`, `read`, `count` and `nbytes`.

    Every method that touches the index may raise `FileUnavailable`; those that write raise `OSError` too.

    Args:
        folder: of all models; made with mode 0700 if it is missing.
        fingerprint: what the KV depends on.
        max_bytes: most bytes of files; other models' folders give way first.

    Raises:
        FolderTaken, OSError, FileUnavailable: it cannot be opened now.
    """

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int) -> None:
        self.nbytes = 0
        self.evicted = 0
        self._max = max_bytes
        self._root = folder / hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
        self._gone: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._root.is_dir():
            _remove(self._root)
        self._root.mkdir(exist_ok=True, mode=0o700)
        self._root.chmod(0o700)
        guard = _lock_folder(self._root)
        if guard is None:
            raise FolderTaken(f"{self._root} is used by another server")
        self._guard = guard
        self._index = DiskIndex(self._root / "index.sqlite")
        try:
            self.found = self._reconcile()
            self._generation = self._index.generation
            self._files = dict(self.found.files)
            self.nbytes = sum(file.nbytes for file in self._files.values())
            self._others = _Others(folder, self._root)
            self._make_room()
            if self._gone:
                self.found = self._index.load()
                self._gone.clear()
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._files)

    def names(self) -> set[str]:
        return set(self._files)

    def record(self, name: str) -> FileRecord | None:
        return self._files.get(name)

    def read(self, file: FileRecord) -> bytes:
        """The file's bytes.

        Raises:
            ValueError: they are not those that were written.
            OSError: it cannot be read.
        """
        descriptor = os.open(self._root / file.name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.nbytes:
                raise ValueError(f"{found.st_size} bytes, not {file.nbytes}")
            data = stream.read(file.nbytes + 1)
        if hashlib.sha256(data).digest() != file.sha256:
            raise ValueError("wrong checksum")
        return data

    def write(self, name: str, data: bytes, meta: str, enter: Callable[[DiskIndex, FileRecord], None]) -> FileRecord:
        """Writes a whole file; `enter` puts it into the index. Makes room for it afterwards."""
        self._check_free(len(data))
        path = self._root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        file = FileRecord(name, len(data), hashlib.sha256(data).digest(), meta)
        try:
            write_atomic(path, data, sync=True)
            enter(self._index, file)
        except BaseException:
            self._forget([name])
            raise
        before = self._files.get(name)
        self._files[name] = file
        self._gone.discard(name)
        self.nbytes += file.nbytes - (before.nbytes if before is not None else 0)
        self._after()
        self._make_room()
        return file

    def split(self, digest: bytes, upper: bytes, at: int) -> None:
        self._index.split(digest, upper, at)
        self._after()

    def touch(self, names: tuple[str, ...]) -> None:
        self._index.touch(names)
        self._after()

    def drop(self, name: str) -> None:
        """Removes the file and what stands on it."""
        self._forget(self._index.drop_files([name]))
        self._after()

    def take_gone(self) -> set[str]:
        """Files that went since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def stands(self) -> bool:
        """Whether the folder is still the one that was opened, and not deleted or replaced."""
        return self._guard.stands()

    def close(self) -> None:
        self._index.close()
        self._guard.drop()

    # --- inside -------------------------------------------------------------------

    def _reconcile(self) -> IndexContent:
        """Makes index and folder agree: no row without its whole file and its parent, no file without a row."""
        sizes = {path.name: _size(path) for path in self._root.iterdir() if path.suffix in (SUFFIX, UNFINISHED)}
        content = self._index.load()
        missing = [file.name for file in content.files.values() if sizes.get(file.name) != file.nbytes]
        if missing:
            log.warning("stored KV: %d files are missing or cut short, %s first", len(missing), missing[0])
            self._index.drop_files(missing)
            content = self._index.load()
        if orphans := _orphans(content):
            self._index.drop_runs(orphans)
            content = self._index.load()
        for name in sizes.keys() - content.files.keys():
            if is_file_name(name) or name.endswith(UNFINISHED):
                _remove(self._root / name)
        return content

    def _after(self) -> None:
        """After each change: if the index had to be begun afresh, nothing is known of the files."""
        if self._index.generation != self._generation:
            self._generation = self._index.generation
            content = self._index.load()
            self._index.drop_files(content.files)  # what was entered last stands on nothing
            self._forget(list(self._files))

    def _make_room(self) -> None:
        """Keeps under the limit: first the folders of models not used now, then the longest unused ends."""
        while self.nbytes + self._others.nbytes > self._max:
            if self._others.drop_oldest():
                continue
            names = self._index.drop_oldest()
            self._after()
            if names is None:
                return
            self._forget(names)
            self.evicted += len(names)

    def _forget(self, names: list[str]) -> None:
        for name in names:
            if is_file_name(name):
                _remove(self._root / name)
            file = self._files.pop(name, None)
            self.nbytes -= file.nbytes if file is not None else 0
            self._gone.add(name)

    def _check_free(self, nbytes: int) -> None:
        usage = shutil.disk_usage(self._root)
        reserve = min(_RESERVE, usage.total // 50)
        if usage.free - nbytes < reserve:
            raise OSError(errno.ENOSPC, f"less than {reserve >> 20} MiB of the disk are free", str(self._root))


class _Others:
    """Folders of other fingerprints beside ours, oldest first."""

    def __init__(self, folder: Path, ours: Path) -> None:
        found: list[tuple[float, Path, int]] = []
        for path in folder.iterdir():
            if path == ours or not _FOLDER_NAME.fullmatch(path.name) or path.is_symlink():
                continue
            with suppress(OSError):  # not ours to judge
                age = (path / "index.sqlite").stat().st_mtime
                found.append((age, path, sum(_size(inside) for inside in path.iterdir())))
        self._sizes = [(path, size) for _, path, size in sorted(found)]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def drop_oldest(self) -> bool:
        """Deletes the oldest folder that no server uses. False: there is none left."""
        while self._sizes:
            path, _ = self._sizes.pop(0)
            with suppress(OSError):
                guard = _lock_folder(path)
                if guard is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    guard.drop()
                    return True
        return False


def _lock_folder(folder: Path) -> FileLock | None:
    """A lock that is held; ``None`` if somebody else has it."""
    path = folder / "lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        _remove(path)
    lock = FileLock(path)
    return lock if lock.take() else None


def _size(path: Path) -> int:
    """Of a file, not of what it links to; -1 if it is no file."""
    found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _orphans(content: IndexContent) -> list[bytes]:
    """Digests of runs and checkpoints that nothing leads to, or whose file is not there."""
    known = {PrefixHash().digest()}
    orphans = []
    for run in content.runs:
        if run.parent in known and run.file in content.files:
            known.add(run.digest)
        else:
            orphans.append(run.digest)
    lost = (d for d, name in content.checkpoints.items() if d not in known or name not in content.files)
    return [*orphans, *lost]
