"""What happened in this room since the start, as totals."""

from __future__ import annotations

import threading

NAMES = ("healed_turns", "notes", "shown_as_sent", "guesses_right", "guesses_wrong")
"""``healed_turns``: answers that came back without their reasoning or otherwise written. ``notes``: requests that an
update note was added to. ``shown_as_sent``: requests with a history that went on from no answer of this server.
``guesses_*``: what re-anchoring expected of a client's next request."""


class PromptCounters:
    """Totals by name. Thread-safe."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Raises KeyError for a name that is none of `NAMES`."""
        with self._lock:
            self._totals[name] += count

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
