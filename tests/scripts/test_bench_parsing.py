from __future__ import annotations

import json
from pathlib import Path

from scripts import bench_parsing


def test_it_measures_every_kind_of_text(tmp_path: Path) -> None:
    assert bench_parsing.main(["--tokens", "200", "--out", str(tmp_path / "o.json")]) == 0
    figures = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert set(figures) == {case.name for case in bench_parsing.cases(200)}
    assert all(0 < value < 5000 for value in figures.values())
