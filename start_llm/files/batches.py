"""Writing off the request path: what is put is written in batches, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class BatchWriter[T]:
    """Hands what was put to `write`, in its order; a kill loses at most what was not yet written.

    `put` and `flush` may be called from any thread. `write` runs on the thread called `name` and must not raise.
    """

    def __init__(self, name: str, write: Callable[[list[T]], None], gather_seconds: float) -> None:
        """`gather_seconds`: how long a batch waits for more after its first item."""
        self._write, self._gather = write, gather_seconds
        self._waiting: Queue[T | None] = Queue()
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

    def flush(self) -> None:
        """Returns when all that was put before is written."""
        if not self.closing:
            self._waiting.join()

    def close(self) -> None:
        """Writes what is waiting and ends the thread. May be called twice."""
        if not self.closing:
            self._closing.set()
            self._waiting.put(None)  # wakes the thread
            self._thread.join()

    def _run(self) -> None:
        while not (self.closing and self._waiting.empty()):
            batch = [self._waiting.get()]
            self._closing.wait(self._gather)
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            if items := [item for item in batch if item is not None]:
                self._write(items)
            for _ in batch:
                self._waiting.task_done()
