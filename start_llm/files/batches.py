"""Writing off the request path: what is put is written in batches, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class BatchWriter[T]:
    """Hands what was put to `write`, in its order; a kill loses at most what was not yet written.

    `put` and `flush` may be called from any thread. `write` runs on the thread called `name` and must not raise.
    """

    def __init__(self, name: str, write: Callable[[list[T]], None], gather_seconds: float) -> None:
        """`gather_seconds`: how long a batch waits for more after its first item."""
        self._write, self._gather = write, gather_seconds
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

    def _run(self) -> None:
        while not (self.closing and self._waiting.empty()):
            batch = [self._waiting.get()]
            self._closing.wait(self._gather)
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            if items := [item for item in batch if not isinstance(item, threading.Event)]:
                self._write(items)
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
