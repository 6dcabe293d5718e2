from __future__ import annotations

import pytest

from start_llm.dashboard import progress
from start_llm.dashboard.progress import ProgressLines


def test_a_step_is_told_when_it_begins_and_ends_and_in_between_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = ProgressLines(said.append)
    for step, part in (("download [x]", 0.0), ("download [x]", 0.5), ("download [x]", 1.0), ("convert", 0.0)):
        lines(step, part)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines("convert", 0.25)
    lines("convert", 1.0)
    assert said == ["download [x] ...", "download [x]: done", "convert ...", "convert: 25%", "convert: done"]
