"""The plots of the README show what the tables of the benchmarks say."""

from __future__ import annotations

import re

import pytest

from scripts.plots import COLOURS, IMAGES, SCENARIOS, TABLES, reuse, table


def texts(drawing: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", drawing)


@pytest.mark.parametrize("theme", COLOURS)
def test_the_plot_in_the_repository_is_that_of_the_tables(theme: str) -> None:
    rows = table(TABLES.read_text(encoding="utf-8"), "scenario")
    kept = (IMAGES / f"reuse-{theme}.svg").read_text(encoding="utf-8")
    assert texts(kept) == texts(reuse(rows, theme)), "run scripts/plots.py again"
    assert {*SCENARIOS.values(), "start_llm", "mlx_lm.server"} <= set(texts(kept))


def test_another_figure_in_the_table_is_another_plot() -> None:
    text = TABLES.read_text(encoding="utf-8")
    rows = table(text, "scenario")
    rows["clock"]["ours, plain"] = "7.77"
    assert "7.77" in texts(reuse(rows, "light"))
    with pytest.raises(ValueError, match="no table begins with a column 'nothing'"):
        table(text, "nothing")
