"""The folder of one model's stored KV.

Each file describes itself (`format`) and appears whole, or not at all. So whatever is killed when, opening the folder
finds every piece by reading the heads of the files; there is no index that could be lost or disagree. The order of use
is that of the files' times. A file goes together with all that stands on it: what `above` leads back to it.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from start_llm.core.sizes import as_size
from start_llm.files.atomic import UNFINISHED, remove_anything, write_atomic
from start_llm.files.locks import FileLock
from start_llm.kvcache.disk.format import FILE_NAME, StoredPiece, encode, read_body, read_head

log = logging.getLogger(__name__)

NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of reading that say nothing about the file."""
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_RESERVE = 1 << 30  # most bytes of disk that are left to others
_HEAD_BYTES = 1 << 14  # read at once: more than most heads have


@dataclass(slots=True)
class _File:
    nbytes: int
    start: int
    above: str
    used: int  # its time, in nanoseconds
    standing: set[str] = field(default_factory=set)  # names of the files that stand on it

    @property
    def is_end(self) -> bool:
        """No other run continues it."""
        return not any(name.startswith("r") for name in self.standing)


class DiskFolder:
    """An open folder. Disk thread only, but for `read`, `take_found` and figures. What writes may raise OSError.

    Args:
        folder: of all models; made with mode 0700 if it is missing.
        fingerprint: what the KV depends on.
        max_bytes: most bytes of files; other models' folders give way first.

    Attributes:
        files: by name; only to be looked at.
        lock: it stands while the folder is the one that was opened, and not deleted or replaced.

    Raises:
        OSError: it cannot be opened now, or another process uses it.
    """

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int) -> None:
        self.nbytes = 0
        self.evicted = 0
        self._max = max_bytes
        self._model = hashlib.sha256(fingerprint.encode()).digest()
        self._root = folder / self._model.hex()[:32]
        self.files: dict[str, _File] = {}
        self._gone: set[str] = set()
        self._last_use = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._root.is_dir():
            remove_anything(self._root)
        self._root.mkdir(exist_ok=True, mode=0o700)
        self._root.chmod(0o700)
        lock = _take_lock(self._root)
        if lock is None:
            raise OSError(f"{self._root} is used by another server")
        self.lock = lock
        try:
            found = self._load()
            self._other_models = _models_beside(self._root)
            self._make_room()
        except BaseException:
            self.close()
            raise
        self._found: list[StoredPiece] = [piece for piece in found if piece.name in self.files]
        self._gone.clear()

    def read(self, name: str) -> tuple[str, bytes] | None:
        """A file's layout and arrays; ``None`` if it is not there. Raises ValueError: it is not what was written;
        OSError."""
        if name not in self.files:
            return None
        with _open(self._path(name)) as stream:
            _, layout_bytes, sha256 = read_head(stream, name, self._model)
            return read_body(stream, layout_bytes, sha256)

    def write(self, piece: StoredPiece, layout: str, arrays: bytes) -> int | None:
        """Returns the bytes of the whole file; ``None`` if what it stands on has gone."""
        name, parts = piece.name, encode(piece, self._model, layout, arrays)
        if piece.above and piece.above not in self.files:
            return None
        nbytes = sum(map(len, parts))
        self._check_free(nbytes)
        path = self._path(name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        write_atomic(path, parts, sync=True)
        self._enter(piece, nbytes, self._next_use())
        self._set_time(name)
        self._gone.discard(name)
        self._make_room()
        return nbytes

    def touch(self, names: Iterable[str]) -> None:
        """They were used now."""
        used = self._next_use()
        for name in names:
            if (file := self.files.get(name)) is not None:
                file.used = used
                self._set_time(name)

    def drop(self, name: str) -> None:
        """Removes the file and all that stands on it."""
        todo = [name]
        for gone in todo:
            if FILE_NAME.fullmatch(gone):
                remove_anything(self._path(gone))
            if (file := self.files.pop(gone, None)) is not None:
                self.nbytes -= file.nbytes
                todo += file.standing
                if (above := self.files.get(file.above)) is not None:
                    above.standing.discard(gone)
            self._gone.add(gone)

    def take_found(self) -> list[StoredPiece]:
        """What was there when it was opened, what others stand on first. Once; for one reader."""
        found, self._found = self._found, []
        return found

    def take_gone(self) -> set[str]:
        """Files that went since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def close(self) -> None:
        self.lock.drop()

    # --- inside -------------------------------------------------------------------

    def _load(self) -> list[StoredPiece]:
        """Reads the heads of all files. What is damaged, or stands on nothing, is removed."""
        found: list[tuple[StoredPiece, int, int]] = []
        unreadable = []
        for entry in os.scandir(self._root):
            if FILE_NAME.fullmatch(entry.name):
                try:
                    with _open(entry.path) as stream:
                        piece, _, _ = read_head(stream, entry.name, self._model)
                        about = os.fstat(stream.fileno())
                        found.append((piece, about.st_size, about.st_mtime_ns))
                except (OSError, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
                        raise
                    unreadable.append(f"{entry.name}: {error}")
                    remove_anything(entry.path)
            elif entry.name.endswith(UNFINISHED):
                remove_anything(entry.path)
        if unreadable:
            log.warning("stored KV: %d files cannot be read and were removed, %s", len(unreadable), unreadable[0])
        found.sort(key=lambda each: each[0].start)  # a piece begins behind the beginning of what it stands on
        entered: dict[str, StoredPiece] = {}
        for piece, nbytes, used in found:
            name, above = piece.name, entered.get(piece.above)
            if piece.start == 0 if not piece.above else above is not None and above.start < piece.start <= above.end:
                entered[name] = piece
                self._enter(piece, nbytes, used)
                self._last_use = max(self._last_use, used)
            else:
                remove_anything(self._path(name))
        return list(entered.values())

    def _enter(self, piece: StoredPiece, nbytes: int, used: int) -> None:
        file = self.files.setdefault(piece.name, _File(0, piece.start, piece.above, used))
        self.nbytes += nbytes - file.nbytes
        if file.above:
            self.files[file.above].standing.discard(piece.name)
        file.nbytes, file.used, file.above = nbytes, used, piece.above
        if piece.above:
            self.files[piece.above].standing.add(piece.name)

    def _next_use(self) -> int:
        """Later than every use before, whatever the clock says."""
        self._last_use = max(time.time_ns(), self._last_use + 1)
        return self._last_use

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)  # see `write_atomic`

    def _set_time(self, name: str) -> None:
        with suppress(OSError):
            os.utime(self._path(name), ns=(self._last_use, self._last_use), follow_symlinks=False)

    def _make_room(self) -> None:
        """Keeps under the limit: first the folders of models not used now, then the longest unused ends."""
        while self._excess() > 0 and self._other_models:
            self._drop_model(self._other_models.pop(0)[0])
        if self._excess() <= 0:
            return
        # A checkpoint goes with its run.
        runs = ((name, file) for name, file in self.files.items() if name.startswith("r"))
        ends = [(file.used, -file.start, name) for name, file in runs if file.is_end]
        heapq.heapify(ends)
        while ends and self._excess() > 0:
            _, _, name = heapq.heappop(ends)
            above, before = self.files[name].above, len(self.files)
            self.drop(name)
            self.evicted += before - len(self.files)
            if above and (file := self.files[above]).is_end:
                heapq.heappush(ends, (file.used, -file.start, above))

    def _excess(self) -> int:
        """Bytes over the limit."""
        return self.nbytes + sum(size for _, size in self._other_models) - self._max

    def _drop_model(self, folder: Path) -> None:
        """Deletes the folder of another model, unless a server uses it."""
        with suppress(OSError):
            if (lock := _take_lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.drop()

    def _check_free(self, nbytes: int) -> None:
        usage = shutil.disk_usage(self._root)
        reserve = min(_RESERVE, usage.total // 50)
        if usage.free - nbytes < reserve:
            problem = f"only {as_size(usage.free)} of the disk are free, {as_size(reserve)} are left to others"
            raise OSError(errno.ENOSPC, problem, str(self._root))


def _models_beside(ours: Path) -> list[tuple[Path, int]]:
    """Folders of other fingerprints beside ours with their bytes, the longest unused first."""
    found: list[tuple[float, Path, int]] = []
    for path in ours.parent.iterdir():
        if path == ours or not _FOLDER_NAME.fullmatch(path.name) or path.is_symlink():
            continue
        with suppress(OSError):  # not ours to judge
            files = [about for inside in path.iterdir() if stat.S_ISREG((about := inside.lstat()).st_mode)]
            age = max((about.st_mtime for about in files), default=0.0)
            found.append((age, path, sum(about.st_size for about in files)))
    return [(path, size) for _, path, size in sorted(found)]


def _take_lock(folder: Path) -> FileLock | None:
    """A lock that is held; ``None`` if somebody else has it."""
    path = folder / "lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove_anything(path)
    lock = FileLock(path)
    return lock if lock.take() else None


def _open(path: str) -> BinaryIO:
    """A pipe in its place does not hang, a link in its place is not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=_HEAD_BYTES)
