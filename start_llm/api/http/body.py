"""Where request bodies wait until they are complete: a little memory, then a file. Knows sizes, not protocols."""

from __future__ import annotations

import logging
import tempfile
import threading

from start_llm.core.errors import Unavailable

log = logging.getLogger(__name__)

MEMORY_OF_ONE = 1 << 18
"""Bytes of a body that stay in memory: as many bodies as there may be connections fit."""
MOST_BYTES = 1 << 30


class Bodies:
    """What all bodies that wait may hold together, in bytes. Thread-safe."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._left = most

    def take(self, count: int) -> bool:
        """False: so much does not fit."""
        with self._lock:
            fits = count <= self._left
            self._left -= count if fits else 0
        return fits

    def give_back(self, count: int) -> None:
        with self._lock:
            self._left += count


class ReceivedBody:
    """One body. Written by the front thread, then read once by another; `close` in any case, more than once if need be.

    A file has no name: it is gone with the process, however that ends.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Raises Unavailable: it does not fit, or the file cannot be written."""
        if self._file is None:  # `close` closes it
            self._file = tempfile.SpooledTemporaryFile(MEMORY_OF_ONE, prefix="start_llm-body-")  # noqa: SIM115
        if not self._bodies.take(len(data)):
            raise Unavailable("Too many large requests are arriving at once. Try again later.")
        self._size += len(data)
        try:
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
        self._bodies.give_back(self._size)
        self._size = 0
