"""`/health` answers within 200 ms while one attack after the other is made on the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle import build_oracle
from tests.stress.sieges import besiege

LIMIT = 0.2
"""Seconds, 99 of 100 answers."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_health_answers_whatever_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        found = besiege(build_oracle(tmp_path / "model", "plain"), tmp_path, 5.0, print)
    assert len(found) > 40
    for figures in found:
        assert figures.health.wrong == [], figures.name
        assert figures.health.is_within(LIMIT), figures.line()
    assert "Traceback" not in (tmp_path / "said").read_text(errors="replace")
