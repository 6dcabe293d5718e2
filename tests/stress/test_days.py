"""Days with an agent: what is compared, and a short week on the oracle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scripts.days import Days, Look, week
from tests.stress.shifted import Shift, shift_clocks

MIB = 2**20


def looked(memory: list[int], files: list[int]) -> Days:
    days = Days(Path(), Path(), lambda: 1.0, lambda: None)
    for number, (size, count) in enumerate(zip(memory, files, strict=True)):
        days.looks.append(Look((number + 1) / len(memory), 0, size * MIB, count, 9, 100, 0, 0))
    return days


def test_what_grows_is_told() -> None:
    assert looked([100] * 5 + [200] * 19, [20] * 24).faults() == ["memory grew by 100.0%"]
    assert looked([50, 60, 80, 100] + [102] * 20, [20] * 24).faults() == []
    assert looked([100] * 24, list(range(20, 44))).faults() == ["files: 25 at first, 43 at last"]


def test_the_clock_of_another_process_is_put_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", real := time.time)
    monkeypatch.setattr(time, "monotonic", time.monotonic)
    shift_clocks(Shift(tmp_path / "shift"))
    before = time.monotonic()
    Shift(tmp_path / "shift").add(3600.0)
    assert 3599 < time.monotonic() - before < 7200 and 3599 < time.time() - real() < 7200


@pytest.mark.live
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_a_week_has_no_errors(tmp_path: Path) -> None:
    """Memory is compared by `scripts/days.py --week` only: a few rounds fill nothing."""
    days = week(tmp_path, 2)
    assert not days.seen.errors and days.rounds == 14 and days.seen.answers["left half-way"] == 4, days.text()
