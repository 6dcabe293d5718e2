"""The order in which a new conversation shows its tools, so that related conversations share a head.

The same set keeps the order that is held already. Among related sets (a sub-agent's list lacks a tool or two), tools
that all of them have come first and those that come and go last, as soon as a new head is made anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from start_llm.core.messages import Tool

CAPACITY = 64


class ToolOrder:
    """The last tool lists that were served, by name. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[frozenset[str], tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def learn(self, names: Iterable[str]) -> tuple[str, ...] | None:
        """Remembers a list; returns it if its set is new."""
        order = tuple(names)
        with self._lock:
            if not order or frozenset(order) in self._seen:
                return None
            self._seen[frozenset(order)] = order
            if len(self._seen) > CAPACITY:
                del self._seen[next(iter(self._seen))]
        return order

    def arrange(self, tools: Sequence[Tool], held: Sequence[Tool] = ()) -> tuple[Tool, ...]:
        """`tools` in the best order; `held` are the tools of a head that is known to be stored."""
        now = {tool.name: tool for tool in tools}
        if len(now) != len(tools) or not tools:
            return tuple(tools)
        if now.keys() == {tool.name for tool in held} and all(now[tool.name] == tool for tool in held):
            return tuple(held)
        names = frozenset(now)
        with self._lock:
            related = [
                order for seen, order in self._seen.items() if 2 * len(seen & names) > max(len(seen), len(names))
            ]
        if not related:
            return tuple(tools)
        stable = names.intersection(*related)
        first = [name for name in related[0] if name in stable]
        return tuple(now[name] for name in [*first, *(name for name in now if name not in stable)])
