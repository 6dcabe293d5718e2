"""Answers that close a reasoning block which nobody has opened."""

from __future__ import annotations

_ANSWERS = 8


class OrphanHabit:
    """Whether a model has lately done so. Shared by all requests of a model; any thread (a lost update does no harm).

    Some models think at once and write the closing tag only, where their template has not opened the block. What was
    sent as text cannot be taken back, so a streamed answer shows that thought as text, the first time. After that, a
    model's next answers are held back until their closing tag, their first call or their end.
    """

    def __init__(self) -> None:
        self._left = 0

    @property
    def likely(self) -> bool:
        return self._left > 0

    def seen(self) -> None:
        """An answer did it: the next ones may."""
        self._left = _ANSWERS

    def missed(self) -> None:
        """An answer that was held back for it did not do it."""
        self._left = max(0, self._left - 1)
