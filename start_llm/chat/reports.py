"""What is known of recent requests, for those who ask about them later."""

from __future__ import annotations

import threading
from collections import OrderedDict

from start_llm.core.report import Background, CacheReport

_REPORTS = 1000
_BACKGROUNDS = 300
"""Kept; the oldest go first."""


class RecentReports:
    """Implements `chat.stream.Reports`. Any thread."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, CacheReport] = OrderedDict()
        self._backgrounds: OrderedDict[str, Background] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, request_id: str, report: CacheReport) -> None:
        with self._lock:
            self._reports[request_id] = report
            while len(self._reports) > _REPORTS:
                self._reports.popitem(last=False)

    def remember_background(self, request_id: str, background: Background) -> None:
        with self._lock:
            self._backgrounds[request_id] = background
            while len(self._backgrounds) > _BACKGROUNDS:
                self._backgrounds.popitem(last=False)

    def report(self, request_id: str) -> CacheReport | None:
        with self._lock:
            return self._reports.get(request_id)

    def background(self, request_id: str) -> Background:
        """An empty one, if it is not known."""
        with self._lock:
            return self._backgrounds.get(request_id, Background())
