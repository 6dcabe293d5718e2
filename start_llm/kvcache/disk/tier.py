"""The disk tier: KV in files that outlive the process. Knows no MLX.

`DiskTier` has its own thread, which writes behind: the model thread hands over numpy copies and goes on.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from start_llm.files.database import FileUnavailable
from start_llm.kvcache.disk.folder import DiskFolder, FolderTaken
from start_llm.kvcache.disk.index import DiskIndex, FileRecord, TokenRun, checkpoint_file, run_file

log = logging.getLogger(__name__)

Buffers = dict[str, np.ndarray[Any, Any]]

RETRY_SECONDS = 10.0

_NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_UNUSABLE = (FolderTaken, FileUnavailable, OSError)


@dataclass(slots=True)
class DiskCounters:
    """Events since the start."""

    written_files: int = 0
    written_bytes: int = 0
    read_files: int = 0
    read_bytes: int = 0
    damaged: int = 0
    failed_writes: int = 0
    pauses: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A piece on its way to disk; `enter` puts it into the index."""

    buffers: Buffers
    meta: str
    nbytes: int
    enter: Callable[[DiskIndex, FileRecord], None]


class DiskTier:
    """Files of stored KV for one model. Public methods are for the model thread; the disk thread is inside.

    While the folder cannot be used (another server has it, the disk is full or read-only) the tier pauses: what is
    queued is lost to it, `ready` is false and `detail` says why. That is logged once. It tries again every
    `retry_seconds`, and then goes on; a folder that could only be opened late has its `contents` then.

    Args:
        folder: made with mode 0700 if it is missing.
        fingerprint: what the KV depends on (weights, quantisation, tokenizer, mlx-lm version).
        max_bytes: most bytes of files; other models' folders give way first.
        queue_bytes: most bytes waiting to be written.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        max_bytes: int,
        *,
        queue_bytes: int = 512 << 20,
        retry_seconds: float | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._open: Callable[[], DiskFolder] = lambda: DiskFolder(folder, fingerprint, max_bytes)
        self._queue_bytes = queue_bytes
        self._retry = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self._folder: DiskFolder | None = None  # set by the disk thread from its start on
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}  # guarded by _lock, as are the next six
        self._waiting_bytes = 0
        self._lost: set[str] = set()
        self._hidden: set[str] = set()  # damaged, and not yet removed
        self._found: tuple[list[TokenRun], dict[bytes, str]] = ([], {})
        self._counters = DiskCounters()
        self._paused = ""  # why
        self._next_try = 0.0
        self._closed = False
        self._abandoned = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._try_open()
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        self._thread.start()

    # --- for the model thread ----------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether pieces are taken now. While paused, one is let through now and then to see whether it works again."""
        with self._lock:
            return not self._closed and (not self._paused or time.monotonic() >= self._next_try)

    @property
    def detail(self) -> str:
        """Why the tier pauses; empty if it does not."""
        with self._lock:
            return self._paused

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        with self._lock:
            return self._waiting_bytes == 0

    def contents(self) -> tuple[list[TokenRun], dict[bytes, str]]:
        """What was found when the folder was opened: runs, parents first, and the checkpoint files by digest. Once."""
        with self._lock:
            found, self._found = self._found, ([], {})
        return found

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` more now (a piece larger than the queue waits until it is empty)."""
        with self._lock:
            return self._waiting_bytes == 0 or self._waiting_bytes + nbytes <= self._queue_bytes

    def write_run(self, run: TokenRun, buffers: Buffers, meta: str) -> str:
        """Queues rows. Returns the file's name, which can be read from now on."""
        run = replace(run, file=run_file(run))
        return self._queue(run.file, buffers, meta, lambda index, file: index.add_run(run, file))

    def write_checkpoint(self, digest: bytes, buffers: Buffers, meta: str) -> str:
        """Queues a checkpoint, see `write_run`."""
        name = checkpoint_file(digest)
        return self._queue(name, buffers, meta, lambda index, file: index.add_checkpoint(digest, file))

    def split(self, digest: bytes, upper: bytes, at: int) -> None:
        """A run was divided in memory, see `DiskIndex.split`."""
        self._on_folder(lambda folder: folder.split(digest, upper, at))

    def touch(self, names: tuple[str, ...]) -> None:
        """These files were used now."""
        self._on_folder(lambda folder: folder.touch(names))

    def drop(self, name: str) -> None:
        """The file is not wanted any more."""
        self._on_folder(lambda folder: folder.drop(name))

    def read(self, name: str) -> tuple[Buffers, str] | None:
        """A piece's buffers and meta text, verified; ``None`` if it is gone or damaged (it is removed then)."""
        with self._lock:
            pending, hidden, folder = self._pending.get(name), name in self._hidden, self._folder
        if pending is not None:
            return pending.buffers, pending.meta
        record = folder.record(name) if folder is not None and not hidden else None
        if folder is None or record is None:
            return None
        try:
            data = folder.read(record)
            buffers = safetensors.numpy.load(data)
        except (OSError, ValueError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_THE_FILE:
                log.warning("stored KV cannot be read now: %s: %s", name, error)
                return None
            log.warning("stored KV is damaged and will be computed again: %s: %s", name, error)
            with self._lock:
                self._hidden.add(name)
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
        """Waits until everything queued so far is on disk, or lost. False: it took longer than `timeout` seconds."""
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout)

    def close(self, timeout: float = 20.0) -> None:
        """Writes what is queued, for at most `timeout` seconds, and lets go of the folder."""
        if self._closed:
            return
        self._abandoned = not self.flush(timeout)
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def stats(self) -> dict[str, int]:
        folder = self._folder
        files = {"files": folder.count, "bytes": folder.nbytes, "evicted_files": folder.evicted} if folder else {}
        with self._lock:
            counters = {name: getattr(self._counters, name) for name in DiskCounters.__slots__}
            now = {"waiting_bytes": self._waiting_bytes, "paused": int(bool(self._paused))}
        return {"files": 0, "bytes": 0, "budget_bytes": self._max_bytes, "evicted_files": 0, **files, **now, **counters}

    # --- the disk thread -------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._retry if self._folder is None else None)
            except Empty:
                task = self._try_open
            if task is None:
                break
            try:
                task()
            except _UNUSABLE as error:
                self._pause(error)
            except Exception:
                log.warning("a task of the disk tier failed", exc_info=True)
                with self._lock:
                    self._counters.failed_writes += 1
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _try_open(self) -> None:
        """Opens the folder, where it is not open."""
        if self._folder is not None or time.monotonic() < self._next_try:
            return
        try:
            folder = self._open()
        except _UNUSABLE as error:
            self._pause(error)
            return
        with self._lock:
            self._folder = folder
            self._found = folder.found.runs, folder.found.checkpoints
        self._resume()

    def _pause(self, error: Exception) -> None:
        with self._lock:
            first = not self._paused
            self._paused = str(error)
            self._next_try = time.monotonic() + self._retry
            self._counters.pauses += first
        if first:
            log.warning("the disk tier pauses, KV stays in memory only: %s", error)
        self._settle()

    def _resume(self) -> None:
        with self._lock:
            before, self._paused = self._paused, ""
        if before:
            log.warning("the disk tier goes on")

    def _settle(self) -> None:
        """After each task: what has gone, and whether the folder is still there."""
        folder = self._folder
        if folder is None:
            return
        gone = folder.take_gone()
        stands = folder.stands()
        if not stands:
            log.warning("the folder of stored KV was taken away; it is begun afresh")
            gone |= folder.names()
            folder.close()
        with self._lock:
            self._hidden -= gone
            self._lost.update(name for name in gone if name not in self._pending)  # not what is written anew
            if not stands:
                self._folder = None
        if not stands:
            self._next_try = 0.0
            self._try_open()

    def _on_folder(self, change: Callable[[DiskFolder], None]) -> None:
        """Queues a small change. While the tier pauses it is left out: that costs reuse, nothing else."""

        def task() -> None:
            if self._folder is not None and not self._paused:
                change(self._folder)
                self._settle()

        self._tasks.put(task)

    def _queue(self, name: str, buffers: Buffers, meta: str, enter: Callable[[DiskIndex, FileRecord], None]) -> str:
        piece = _Pending(buffers, meta, sum(buffer.nbytes for buffer in buffers.values()), enter)
        with self._lock:
            self._pending[name] = piece
            self._waiting_bytes += piece.nbytes
        self._tasks.put(lambda: self._write(name, piece))
        return name

    def _write(self, name: str, piece: _Pending) -> None:
        written: FileRecord | None = None
        try:
            self._try_open()
            if self._folder is not None and not self._abandoned and time.monotonic() >= self._next_try:
                written = self._folder.write(name, safetensors.numpy.save(piece.buffers), piece.meta, piece.enter)
                self._resume()
        finally:
            with self._lock:
                if self._pending.get(name) is piece:
                    del self._pending[name]
                self._waiting_bytes -= piece.nbytes
                if written is None:
                    self._lost.add(name)
                    self._counters.failed_writes += 1
                else:
                    self._hidden.discard(name)
                    self._counters.written_files += 1
                    self._counters.written_bytes += written.nbytes
            self._settle()
