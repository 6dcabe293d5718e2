"""What happened in this room since the start, as totals."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from start_llm.core.messages import Message
from start_llm.prompt.tokenise import Coded
from start_llm.prompt.turns import Record
from start_llm.prompt.view import Entry, View

NAMES = ("exact_key_rejected_by_model_lcp", "healed_turns", "notes", "guesses_right", "guesses_wrong")


class Counters:
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


def healed_turns(messages: Sequence[Message], entries: Sequence[Entry], known: Sequence[bytes]) -> int:
    """Assistant turns that healing changed, those of the chain's `known` part left out."""
    seen = frozenset(known)
    return sum(
        entry.message != message
        for message, entry in zip(messages, entries, strict=True)
        if message.role == "assistant" and entry.link is not None and entry.link not in seen
    )


def rejected(record: Record, depth: int, view: View, coded: Coded) -> bool:
    """The canonical chain led to the whole record, but the rendered text parts from the record's within it.

    That is: a rule takes out of the canonical form what the model is shown. It happens under ``strict``, where drift
    is shown in its place; ``append`` shows the record's bytes. A template that shows equal messages otherwise (it
    drops old reasoning, say) breaks no promise of the chain.
    """
    if depth < len(record.chain) or view.tools != record.tools or coded.common >= record.opens[-1].char:
        return False
    old = [shown.message for shown in record.shown if not shown.transient]
    if not view.strict:
        old = old[: view.matched]  # from there on an update note was added
    return [shown.message for shown in view.shown[: len(old)]] != old
