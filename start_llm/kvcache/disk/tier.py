"""The disk tier: KV in files that outlive the process. Knows no MLX.

`DiskTier` has its own thread, which writes behind: the model thread hands over numpy copies and goes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from start_llm.kvcache.disk.folder import NOT_THE_FILE, DiskFolder
from start_llm.kvcache.disk.format import StoredPiece

log = logging.getLogger(__name__)

Buffers = dict[str, np.ndarray[Any, Any]]

Identify = Callable[[Callable[[], bool]], str]
"""Finds out the fingerprint on the disk thread; empty once its argument says that nobody waits. Raises OSError."""
COUNTERS = ("written_files", "written_bytes", "read_files", "read_bytes", "damaged", "failed_writes", "pauses")
"""Events since the start."""


class DiskTier:
    """Files of stored KV for one model. Public methods are for the model thread; the disk thread is inside.

    While the folder cannot be used (another server has it, the disk is full or read-only) the tier pauses: what is
    queued is lost to it, `ready` is false and `detail` says why. That is logged once. It tries again every
    `retry_seconds`, and then goes on; a folder that could only be opened late has its `contents` then.

    Args:
        folder: made with mode 0700 if it is missing; ``None``: nothing is kept, and the tier is never ready.
        fingerprint: what the KV depends on (weights, quantisation, tokenizer, mlx-lm version), or what finds that out;
            the tier pauses until then.

    Attributes:
        max_bytes: most bytes of files; other models' folders give way first.
        queue_bytes: most bytes waiting to be written.
        detail: why the tier pauses; empty if it does not.
        waiting_bytes: on their way to disk; they can be read meanwhile.
    """

    retry_seconds = 10.0
    queue_bytes = 512 << 20

    def __init__(self, folder: Path | None, fingerprint: str | Identify = "", max_bytes: int = 0) -> None:
        self._place, self.max_bytes = folder, max_bytes
        self._fingerprint = fingerprint if isinstance(fingerprint, str) else ""
        self._folder: DiskFolder | None = None  # set by the disk thread from its start on
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Buffers, str]] = {}  # by file name; guarded by _lock, as are the next six
        self.waiting_bytes = 0
        self._lost: set[str] = set()
        self._hidden: set[str] = set()  # damaged, and not yet removed
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.detail = ""
        self._next_try = 0.0
        self._closed = folder is None
        self._closing = self._abandoned = False
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        if folder is not None:
            if isinstance(fingerprint, str):
                self._try_open()
            else:
                self.detail, self._next_try = "all bytes of the weights are read, once", math.inf
                self._tasks.put(lambda: self._identify(fingerprint))
            self._thread.start()

    # --- for the model thread ----------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether pieces are taken now. While paused, one is let through now and then to see whether it works again."""
        with self._lock:
            return not self._closed and (not self.detail or time.monotonic() >= self._next_try)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait (a piece that is larger than the limit waits until nothing else does)."""
        return self.waiting_bytes == 0 or self.waiting_bytes + nbytes <= self.queue_bytes

    def contents(self) -> list[StoredPiece]:
        """What was found when the folder was opened, what others stand on first. Once."""
        folder = self._folder
        return [] if folder is None else folder.take_found()

    def write(self, piece: StoredPiece, buffers: Buffers, layout: str) -> str:
        """Queues a piece; what it stands on was queued before. Returns the file's name, to be read from now on."""
        data = buffers, layout
        with self._lock:
            self._pending[piece.name] = data
            self.waiting_bytes += _size(buffers)
        self._tasks.put(lambda: self._write(piece, data))
        return piece.name

    def touch(self, names: tuple[str, ...]) -> None:
        """These files were used now."""
        self._on_folder(lambda folder: folder.touch(names))

    def drop(self, name: str) -> None:
        """The file is not wanted any more, nor what stands on it."""
        self._on_folder(lambda folder: folder.drop(name))

    def read(self, name: str) -> tuple[Buffers, str] | None:
        """A piece's buffers and layout, verified; ``None`` if it is gone or damaged (it is removed then)."""
        if (pending := self._pending.get(name)) is not None:
            return pending
        with self._lock:
            folder = self._folder if name not in self._hidden else None
        try:
            found = folder.read(name) if folder is not None else None
            if found is None:
                return None
            layout, arrays = found
            buffers = safetensors.numpy.load(arrays)
        except (OSError, ValueError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
                log.warning("stored KV cannot be read now: %s: %s", name, error)
                return None
            log.warning("stored KV is damaged and will be computed again: %s: %s", name, error)
            with self._lock:
                self._hidden.add(name)
                self._counters["damaged"] += 1
            self.drop(name)
            return None
        with self._lock:
            self._counters["read_files"] += 1
            self._counters["read_bytes"] += len(arrays)
        return buffers, layout

    def take_lost(self) -> set[str]:
        """Files that went since the last call: evicted, damaged, or not written."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything queued so far is on disk, or lost. False: it took longer than `timeout` seconds."""
        done = threading.Event()
        self._tasks.put(done.set)
        return self._closed or done.wait(timeout)

    def close(self, timeout: float = 20.0) -> None:
        """Writes what is queued, for at most `timeout` seconds, and lets go of the folder."""
        if self._closed:
            return
        self._closing = True
        self._abandoned = not self.flush(timeout)
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def stats(self) -> dict[str, int]:
        """Empty where nothing is kept."""
        if self._place is None:
            return {}
        folder = self._folder
        files = {"files": len(folder.files), "bytes": folder.nbytes, "evicted_files": folder.evicted} if folder else {}
        with self._lock:
            now = {"waiting_bytes": self.waiting_bytes, "paused": int(bool(self.detail)), **self._counters}
        return {"files": 0, "bytes": 0, "budget_bytes": self.max_bytes, "evicted_files": 0, **files, **now}

    # --- the disk thread -------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self.retry_seconds if self._folder is None else None)
            except Empty:
                task = self._try_open
            if task is None:
                break
            try:
                task()
            except OSError as error:
                self._pause(error)
            except Exception:
                log.warning("a task of the disk tier failed", exc_info=True)
                with self._lock:
                    self._counters["failed_writes"] += 1
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _identify(self, find: Identify) -> None:
        """Nothing is read or written before it is known whose it is; never, if that cannot be found out."""
        try:
            self._fingerprint = find(lambda: self._closing)
        except OSError as error:
            log.warning("KV stays in memory only: %s", error)
            self.detail = str(error)
            return
        if self._fingerprint:
            self._try_open(at_once=True)

    def _try_open(self, *, at_once: bool = False) -> None:
        """Opens the folder, where it is not open."""
        if self._place is None or self._folder is not None or (time.monotonic() < self._next_try and not at_once):
            return
        try:
            folder = DiskFolder(self._place, self._fingerprint, self.max_bytes)
        except OSError as error:
            self._pause(error)
            return
        with self._lock:
            self._folder, self._next_try = folder, 0.0  # who sees that the tier is ready finds what is in the folder
        self._resume()

    def _pause(self, error: Exception) -> None:
        with self._lock:
            first = not self.detail
            self.detail = str(error)
            self._next_try = time.monotonic() + self.retry_seconds
            self._counters["pauses"] += first
        if first:
            log.warning("the disk tier pauses, KV stays in memory only: %s", error)
        self._settle()

    def _resume(self) -> None:
        with self._lock:
            paused, self.detail = self.detail and self._counters["pauses"], ""
        if paused:
            log.warning("the disk tier goes on")

    def _settle(self) -> None:
        """After each task: what has gone, and whether the folder is still there."""
        folder = self._folder
        if folder is None:
            return
        gone = folder.take_gone()
        stands = folder.lock.stands()
        if not stands:
            log.warning("the folder of stored KV was taken away; it is begun afresh")
            gone.update(folder.files)
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
            if self._folder is not None and not self.detail:
                change(self._folder)
                self._settle()

        self._tasks.put(task)

    def _write(self, piece: StoredPiece, data: tuple[Buffers, str]) -> None:
        name, (buffers, layout) = piece.name, data
        written: int | None = None
        try:
            self._try_open()
            if self._folder is not None and not self._abandoned and time.monotonic() >= self._next_try:
                written = self._folder.write(piece, layout, safetensors.numpy.save(buffers))
                self._resume()
        finally:
            with self._lock:
                self.waiting_bytes -= _size(buffers)
                if self._pending.get(name) is data:  # a newer one of the same name stays
                    del self._pending[name]
                if written is None:
                    self._lost.add(name)
                    self._counters["failed_writes"] += 1
                else:
                    self._hidden.discard(name)
                    self._counters["written_files"] += 1
                    self._counters["written_bytes"] += written
            self._settle()


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers.values())
