"""Where request bodies wait until they are complete: a little memory, then a file. Knows sizes, not protocols."""

from __future__ import annotations

import logging
import tempfile
import threading
from typing import IO

from start_llm.core.errors import Unavailable

log = logging.getLogger(__name__)

MEMORY_OF_ONE = 1 << 20
MEMORY_OF_ALL = 64 << 20
DISK_OF_ALL = 1 << 30


class Bodies:
    """What all bodies that wait may hold together, in bytes; at least two of the `largest` find room. Thread-safe."""

    def __init__(self, largest: int, memory: int = MEMORY_OF_ALL, disk: int = DISK_OF_ALL) -> None:
        self._lock = threading.Lock()
        self._memory = memory
        self._disk = max(disk, 2 * largest)

    def take(self, *, memory: int = 0, disk: int = 0) -> bool:
        """False: there is no room."""
        with self._lock:
            if memory > self._memory or disk > self._disk:
                return False
            self._memory -= memory
            self._disk -= disk
            return True

    def give_back(self, memory: int, disk: int) -> None:
        with self._lock:
            self._memory += memory
            self._disk += disk


class ReceivedBody:
    """One body. Written by the front thread, then read once by another; `close` in any case, more than once if need be.

    A file has no name: it is gone with the process, however that ends.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._memory = bytearray()
        self._on_disk = 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Raises Unavailable: no room, or the file cannot be written."""
        fits = self._file is None and len(self._memory) + len(data) <= MEMORY_OF_ONE
        if fits and self._bodies.take(memory=len(data)):
            self._memory += data
            return
        try:
            if self._file is None:
                self._move_to_file()
            self._append(data)
        except OSError as error:
            log.warning("a request's body could not be kept in %s: %s", tempfile.gettempdir(), error)
            raise Unavailable("The server has no room on its disk for the request's body.") from None

    def read(self) -> bytes:
        """All of it. Raises OSError."""
        if self._file is None:
            data = bytes(self._memory)
        else:
            self._file.seek(0)
            data = self._file.read()
        self.close()
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._bodies.give_back(len(self._memory), self._on_disk)
        self._memory, self._on_disk = bytearray(), 0

    def _move_to_file(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="start_llm-body-")  # noqa: SIM115  (`close` closes it)
        self._append(self._memory)
        self._bodies.give_back(len(self._memory), 0)
        self._memory = bytearray()

    def _append(self, data: bytes | bytearray) -> None:
        if not self._bodies.take(disk=len(data)):
            raise Unavailable("Too many large requests are arriving at once. Try again later.")
        self._on_disk += len(data)
        assert self._file is not None
        self._file.write(data)
