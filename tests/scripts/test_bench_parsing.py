from __future__ import annotations

import json
from pathlib import Path

from scripts import bench_parsing
from start_llm.parsing.stream import OutputParser


def test_it_measures_every_kind_of_text(tmp_path: Path) -> None:
    assert bench_parsing.main(["--tokens", "200", "--out", str(tmp_path / "o.json")]) == 0
    figures = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert set(figures) == {case.name for case in bench_parsing.cases(200)}
    assert all(0 < value < 5000 for value in figures.values())


def test_its_calls_are_calls() -> None:
    for case in bench_parsing.cases(200):
        parser = OutputParser(case.style, tools=(bench_parsing.WRITE,), stop=case.stop, in_reasoning=case.inside)
        for piece in case.pieces:
            parser.feed(piece)
        parser.finish()
        parsed = parser.parsed()
        assert len(parsed.tool_calls) == case.name.startswith("call"), case.name
        assert bool(parsed.reasoning) == case.inside and parser.stopped is None
