"""A cache in memory: the entries that were used last stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator


class Lru[K, V]:
    """Entries by key, bounded by their number, or by their size. Thread-safe.

    `get` and `put` are uses; looking in any other way is none. The last entry stays, whatever its size.

    Args:
        most: entries; with `size`, the sum of their sizes.
        size: of an entry, by its key and value; it does not change.
    """

    def __init__(self, most: int, size: Callable[[K, V], int] | None = None) -> None:
        self._most = most
        self._size = size or (lambda key, value: 1)
        self._total = 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Adds or replaces an entry, and drops those that were used longest ago."""
        with self._lock:
            self._remove(key)
            self._entries[key] = value
            self._total += self._size(key, value)
            while self._total > self._most and len(self._entries) > 1:
                self._remove(next(iter(self._entries)))

    def pop(self, key: K) -> V | None:
        with self._lock:
            return self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._total = 0

    def items(self) -> list[tuple[K, V]]:
        """As they are now, the one used longest ago first."""
        with self._lock:
            return list(self._entries.items())

    def values(self) -> list[V]:
        return [value for _, value in self.items()]

    def __iter__(self) -> Iterator[K]:
        return iter([key for key, _ in self.items()])

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _remove(self, key: K) -> V | None:
        if key not in self._entries:
            return None
        value = self._entries.pop(key)
        self._total -= self._size(key, value)
        return value
