"""What is known of recent requests, for those who ask about them later."""

from __future__ import annotations

from start_llm.core.report import Background, CacheReport
from start_llm.files.lru import Lru

_REPORTS = 1000
_BACKGROUNDS = 300
"""Kept; the oldest go first."""


class RecentReports:
    """Implements `chat.stream.Reports`. Any thread."""

    def __init__(self) -> None:
        self._reports: Lru[str, CacheReport] = Lru(_REPORTS)
        self._backgrounds: Lru[str, Background] = Lru(_BACKGROUNDS)
        self.remember = self._reports.put
        self.remember_background = self._backgrounds.put
        self.report = self._reports.get

    def background(self, request_id: str) -> Background:
        """An empty one, if it is not known."""
        return self._backgrounds.get(request_id) or Background()
