"""Writing into a database off the request path: what is put is written in batches, on a thread of its own."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue

from start_llm.files.database import CacheDatabase, FileUnavailable

log = logging.getLogger(__name__)


class BatchWriter[T]:
    """Hands what was put to `write`, in its order; a kill loses at most what was not yet written.

    `put` and `flush` may be called from any thread. `write` runs on the thread called `name`, in a transaction of
    `database`, which is closed with this.
    """

    def __init__(
        self,
        name: str,
        database: CacheDatabase,
        write: Callable[[sqlite3.Connection, list[T]], None],
        gather_seconds: float,
    ) -> None:
        """`gather_seconds`: how long a batch waits for more after its first item."""
        self._database, self._write, self._gather = database, write, gather_seconds
        self._waiting: SimpleQueue[T | threading.Event] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def put(self, item: T) -> None:
        """Left out after `close`."""
        if not self.closing:
            self._waiting.put(item)

    def flush(self, seconds: float | None = None) -> bool:
        """Returns when all that was put before is written; False: not within `seconds`."""
        if self.closing:
            return True
        written = threading.Event()
        self._waiting.put(written)
        return written.wait(seconds)

    def close(self) -> None:
        """Writes what is waiting and ends the thread. May be called twice."""
        if not self.closing:
            self._closing.set()
            self._waiting.put(threading.Event())  # wakes the thread
            self._thread.join()
            self._database.close()

    def _run(self) -> None:
        while not (self.closing and self._waiting.empty()):
            batch = [self._waiting.get()]
            self._closing.wait(self._gather)
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            if items := [item for item in batch if not isinstance(item, threading.Event)]:
                self._write_all(items)
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()

    def _write_all(self, items: list[T]) -> None:
        try:
            self._database.run(lambda connection: self._write(connection, items))
        except FileUnavailable:
            pass  # said once by the file itself
        except Exception as error:  # noqa: BLE001 - the thread's edge: the next batch may do better
            log.warning("%s: %d rows could not be written (%s)", self._database.what, len(items), error)
