"""Where request bodies wait until they are complete: a little memory, then a file. Knows sizes, not protocols."""

from __future__ import annotations

import logging
import tempfile
import threading

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
        self._memory = self._on_disk = 0  # bytes
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Raises Unavailable: no room, or the file cannot be written."""
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(prefix="start_llm-body-")  # noqa: SIM115  (`close` closes it)
        fits = not self._on_disk and self._memory + len(data) <= MEMORY_OF_ONE
        if fits and self._bodies.take(memory=len(data)):
            self._memory += len(data)
        elif self._bodies.take(disk=self._memory + len(data)):
            self._bodies.give_back(self._memory, 0)
            self._memory, self._on_disk = 0, self._on_disk + self._memory + len(data)
        else:
            raise Unavailable("Too many large requests are arriving at once. Try again later.")
        try:
            if self._on_disk:
                self._file.rollover()  # once
            self._file.write(data)
        except OSError as error:
            log.warning("a request's body could not be kept in %s: %s", tempfile.gettempdir(), error)
            raise Unavailable("The server has no room on its disk for the request's body.") from None

    def read(self) -> bytes:
        """All of it. Raises OSError."""
        data = b""
        if self._file is not None:
            self._file.seek(0)
            data = self._file.read()
        self.close()
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._bodies.give_back(self._memory, self._on_disk)
        self._memory = self._on_disk = 0
