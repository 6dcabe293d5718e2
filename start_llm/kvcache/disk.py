"""The disk tier: bytes of KV in files that outlive the process. Knows no MLX.

`DiskTier` has its own thread, which writes behind: the model thread hands over numpy copies and goes
on. A file is written under a temporary name, synced, renamed, and only then entered in the index with
its SHA-256; so whatever is killed when, the index names whole files only, and what does not match
its checksum is never served.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from start_llm.kvcache.diskindex import DiskIndex, FileRecord, Run

log = logging.getLogger(__name__)

Buffers = dict[str, np.ndarray[Any, Any]]

_TEMPORARY = ".writing"
_SUFFIX = ".safetensors"


@dataclass(slots=True)
class DiskCounters:
    """Events since the start."""

    written_files: int = 0
    written_bytes: int = 0
    read_files: int = 0
    read_bytes: int = 0
    damaged: int = 0
    evicted_files: int = 0
    failed_writes: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A piece on its way to disk; `enter` puts it into the index."""

    buffers: Buffers
    meta: str
    nbytes: int
    enter: Callable[[DiskIndex, FileRecord], None]


class DiskTier:
    """Files of stored KV for one model. Public methods are for the model thread; the disk thread is inside.

    If another process uses the same folder and fingerprint, or the folder cannot be used, the tier
    is inactive: it says so in `detail` and in the log, and must not be called further.

    Args:
        folder: made with mode 0700 if it is missing.
        fingerprint: what the KV depends on (weights, quantisation, tokenizer, mlx-lm version).
        max_bytes: most bytes of files; other models' folders give way first.
        queue_bytes: most bytes waiting to be written.
    """

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int, *, queue_bytes: int = 512 << 20) -> None:
        self.active = False
        self.detail = ""
        self._max = max_bytes
        self._queue_bytes = queue_bytes
        self._root = folder / hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
        self._lock = threading.Lock()
        self._files: dict[str, FileRecord] = {}  # guarded by _lock, as are the next three
        self._pending: dict[str, _Pending] = {}
        self._waiting_bytes = 0
        self._lost: set[str] = set()
        self._found: tuple[list[Run], dict[bytes, str]] = ([], {})
        self._counters = DiskCounters()
        self._abandoned = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        try:
            self._open(folder)
        except OSError as error:
            self._say_off(f"{self._root}: {error}")

    # --- for the model thread ----------------------------------------------

    def contents(self) -> tuple[list[Run], dict[bytes, str]]:
        """What was found at start: runs, parents first, and the checkpoint files by digest. Once."""
        found, self._found = self._found, ([], {})
        return found

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` more now (a piece larger than the queue waits until it is empty)."""
        with self._lock:
            return self._waiting_bytes == 0 or self._waiting_bytes + nbytes <= self._queue_bytes

    def write_run(self, run: Run, buffers: Buffers, meta: str) -> str:
        """Queues rows. Returns the file's name, which can be read from now on."""
        name = f"r{run.start}-{run.digest.hex()}{_SUFFIX}"
        run = replace(run, file=name, used=time.time())
        return self._queue(name, _Pending(buffers, meta, _size(buffers), lambda index, file: index.add_run(run, file)))

    def write_checkpoint(self, digest: bytes, buffers: Buffers, meta: str) -> str:
        """Queues a checkpoint, see `write_run`."""
        name = f"c-{digest.hex()}{_SUFFIX}"
        enter: Callable[[DiskIndex, FileRecord], None] = lambda index, file: index.add_checkpoint(digest, file)  # noqa: E731
        return self._queue(name, _Pending(buffers, meta, _size(buffers), enter))

    def split(self, digest: bytes, upper: bytes, at: int) -> None:
        """A run was divided in memory, see `DiskIndex.split`."""
        self._tasks.put(lambda: self._index.split(digest, upper, at))

    def touch(self, names: tuple[str, ...]) -> None:
        """These files were used now."""
        now = time.time()
        self._tasks.put(lambda: self._index.touch(names, now))

    def drop(self, name: str) -> None:
        """The file is not wanted any more."""
        self._tasks.put(lambda: self._forget(self._index.drop_file(name)))

    def read(self, name: str) -> tuple[Buffers, str] | None:
        """A piece's buffers and meta text, verified; ``None`` if it is gone or damaged (it is removed then)."""
        with self._lock:
            pending, record = self._pending.get(name), self._files.get(name)
        if pending is not None:
            return pending.buffers, pending.meta
        if record is None:
            return None
        try:
            data = (self._root / name).read_bytes()
            if len(data) != record.nbytes or hashlib.sha256(data).digest() != record.sha256:
                raise ValueError(f"{len(data)} of {record.nbytes} bytes, or a wrong checksum")
            buffers = safetensors.numpy.load(data)
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("stored KV is damaged and will be computed again: %s: %s", name, error)
            with self._lock:
                self._files.pop(name, None)
                self._counters.damaged += 1
            self.drop(name)
            return None
        with self._lock:
            self._counters.read_files += 1
            self._counters.read_bytes += len(data)
        return buffers, record.meta

    def take_lost(self) -> set[str]:
        """Files that went since the last call: evicted, damaged, or not written."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything queued so far is on disk. False: it took longer than `timeout` seconds."""
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout)

    def close(self, timeout: float = 20.0) -> None:
        """Writes what is queued, for at most `timeout` seconds, and lets go of the folder."""
        if not self.active:
            return
        self.active = False
        self._abandoned = not self.flush(timeout)
        self._tasks.put(None)
        self._thread.join()
        self._index.close()
        os.close(self._guard)

    def stats(self) -> dict[str, int]:
        with self._lock:
            counters = {name: getattr(self._counters, name) for name in DiskCounters.__slots__}
            total = sum(file.nbytes for file in self._files.values())
            return {"files": len(self._files), "bytes": total, "waiting_bytes": self._waiting_bytes, **counters}

    # --- opening -------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root.mkdir(exist_ok=True, mode=0o700)
        self._root.chmod(0o700)
        guard = _lock_folder(self._root)
        if guard is None:
            self._say_off(f"{self._root} is used by another server")
            return
        self._guard = guard
        try:
            self._index = self._open_index()
            self._reconcile()
            self._others = _Others(folder, self._root)
            self._bytes = sum(file.nbytes for file in self._files.values())
            self._make_room()
            self._found = self._index.runs(), self._index.checkpoints()
        except sqlite3.Error as error:
            os.close(guard)
            self._say_off(f"{self._root}: {error}")
            return
        self.active = True
        self._thread.start()

    def _say_off(self, why: str) -> None:
        self.detail = why
        log.warning("the disk tier is off: %s", why)

    def _open_index(self) -> DiskIndex:
        path = self._root / "index.sqlite"
        old_mask = os.umask(0o077)  # SQLite makes its side files with the mode of the main one
        try:
            try:
                return DiskIndex(path)
            except sqlite3.DatabaseError as error:
                log.warning("the index of the disk tier is unusable and is made anew: %s", error)
                for side in ("", "-wal", "-shm"):
                    path.with_name(path.name + side).unlink(missing_ok=True)
                return DiskIndex(path)
        finally:
            os.umask(old_mask)

    def _reconcile(self) -> None:
        """Makes index and folder agree: no row without its whole file and its parent, no file without a row."""
        there = {
            path.name: path.stat().st_size for path in self._root.iterdir() if path.suffix in (_SUFFIX, _TEMPORARY)
        }
        for file in self._index.files():
            if there.get(file.name) != file.nbytes:
                log.warning("stored KV is missing or cut short: %s", file.name)
                self._index.drop_file(file.name)
        root = hashlib.sha256().digest()
        known = {root}
        for run in self._index.runs():
            if run.parent in known:
                known.add(run.digest)
            else:
                self._index.drop_run(run.digest)
        for digest in self._index.checkpoints().keys() - known:
            self._index.drop_run(digest)
        self._files = {file.name: file for file in self._index.files()}
        for name in there.keys() - self._files.keys():
            (self._root / name).unlink(missing_ok=True)

    # --- the disk thread -------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.warning("a task of the disk tier failed", exc_info=True)
                with self._lock:
                    self._counters.failed_writes += 1

    def _queue(self, name: str, piece: _Pending) -> str:
        with self._lock:
            self._pending[name] = piece
            self._waiting_bytes += piece.nbytes
        self._tasks.put(lambda: self._write(name, piece))
        return name

    def _write(self, name: str, piece: _Pending) -> None:
        if self._abandoned:
            return
        written: FileRecord | None = None
        try:
            data = safetensors.numpy.save(piece.buffers)
            _write_whole(self._root / name, data)
            written = FileRecord(name, len(data), hashlib.sha256(data).digest(), piece.meta)
            piece.enter(self._index, written)
        except (OSError, sqlite3.Error) as error:
            log.warning("KV could not be written: %s: %s", name, error)
            written = None
            with suppress(OSError):
                (self._root / name).unlink(missing_ok=True)
        with self._lock:
            if self._pending.get(name) is piece:
                del self._pending[name]
            self._waiting_bytes -= piece.nbytes
            if written is None:
                self._lost.add(name)
                self._counters.failed_writes += 1
                return
            before = self._files.get(name)
            self._files[name] = written
            self._counters.written_files += 1
            self._counters.written_bytes += written.nbytes
        self._bytes += written.nbytes - (before.nbytes if before is not None else 0)
        self._make_room()

    def _make_room(self) -> None:
        """Keeps under the limit: first the folders of models not used now, then the longest unused ends."""
        while self._bytes + self._others.nbytes > self._max:
            if self._others.drop_oldest():
                continue
            digest = self._index.oldest_leaf()
            if digest is None:
                return
            gone = self._index.drop_run(digest)
            self._forget(gone)
            with self._lock:
                self._counters.evicted_files += len(gone)

    def _forget(self, names: list[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)
        with self._lock:
            for name in names:
                file = self._files.pop(name, None)
                self._bytes -= file.nbytes if file is not None else 0
            self._lost.update(name for name in names if name not in self._pending)  # not what is written anew


class _Others:
    """Folders of other fingerprints beside ours, oldest first."""

    def __init__(self, folder: Path, ours: Path) -> None:
        found = [
            path for path in folder.iterdir() if path.is_dir() and path != ours and (path / "index.sqlite").exists()
        ]
        found.sort(key=lambda path: (path / "index.sqlite").stat().st_mtime)
        self._sizes = [(path, sum(p.stat().st_size for p in path.iterdir() if p.is_file())) for path in found]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def drop_oldest(self) -> bool:
        """Deletes the oldest folder that no server uses. False: there is none left."""
        while self._sizes:
            path, _ = self._sizes.pop(0)
            guard = _lock_folder(path)
            if guard is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(guard)
                return True
        return False


def _lock_folder(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed or the process ends; ``None`` if somebody else has it."""
    guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        return None
    return guard


def _write_whole(path: Path, data: bytes) -> None:
    """All or nothing, mode 0600, on the platter before the name appears."""
    temporary = path.with_suffix(_TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers.values())
