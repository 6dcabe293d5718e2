"""What each client's requests reused over the last day, in quarters of an hour. Counts only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry
from start_llm.dashboard.observer import Observer, Outcome

SLOT_SECONDS = 900
SLOTS = 96
MOST_CLIENTS = 16
OTHERS = "others"


class Daily(Observer):
    """Thread-safe.

    Args:
        clock: unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, dict[int, list[int]]] = {}

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        report = outcome.report
        if report is None or not report.prompt:
            return
        with self._lock:
            self._add(self._clock(), request.client, report.reused, report.computed, report.new)

    def begin_with(self, entries: Iterable[AuditEntry]) -> None:
        """Counts what was written down before this server was started."""
        with self._lock:
            for entry in entries:
                if entry.prompt:
                    self._add(entry.time, entry.client, entry.reused, entry.computed, entry.new)

    def _add(self, when: float, client: str, reused: int, computed: int, new: int) -> None:
        slot = int(when) // SLOT_SECONDS
        self._forget(int(self._clock()) // SLOT_SECONDS)
        name = client or "other"
        if name not in self._clients and len(self._clients) >= MOST_CLIENTS:
            name = OTHERS
        again = max(0, computed - new)
        counts = self._clients.setdefault(name, {}).setdefault(slot, [0, 0, 0, 0])
        for index, more in enumerate((1, reused, computed - again, again)):
            counts[index] += more

    def day(self) -> dict[str, Any]:
        """Per client ``[slot, requests, reused, new, again]``, slots from the first of the day on; busiest first."""
        slot = int(self._clock()) // SLOT_SECONDS
        first = slot - SLOTS + 1
        with self._lock:
            self._forget(slot)
            busiest = sorted(
                self._clients.items(), key=lambda item: -sum(sum(counts[1:]) for counts in item[1].values())
            )
            clients = [
                {"name": name, "slots": [[at - first, *counts] for at, counts in sorted(slots.items())]}
                for name, slots in busiest
            ]
        return {"slots": SLOTS, "slot_seconds": SLOT_SECONDS, "clients": clients}

    def _forget(self, slot: int) -> None:
        for name, slots in list(self._clients.items()):
            for at in [at for at in slots if at <= slot - SLOTS]:
                del slots[at]
            if not slots:
                del self._clients[name]
