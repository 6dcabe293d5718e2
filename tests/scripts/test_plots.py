"""The plots of the README show what the tables of the benchmarks say."""

from __future__ import annotations

import re

import pytest

from tests.lazy import Package

plots = Package("scripts.plots")


def texts(drawing: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", drawing)


SHOWN = {"reuse": {"start_llm", "mlx_lm.server", "sub-agents"}, "sessions": {"start_llm", "knows the future"}}


@pytest.mark.live
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", SHOWN)
def test_the_plot_in_the_repository_is_that_of_the_tables(name: str, theme: str) -> None:
    assert theme in plots.COLOURS and len(plots.COLOURS) == 2 and plots.PLOTS.keys() == SHOWN.keys()
    heading, draw = plots.PLOTS[name]
    rows = plots.table(plots.TABLES.read_text(encoding="utf-8"), heading)
    kept = (plots.IMAGES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
    assert texts(kept) == texts(draw(rows, theme)), "run scripts/plots.py again"
    assert SHOWN[name] <= set(texts(kept))


@pytest.mark.thorough
def test_another_figure_in_the_table_is_another_plot() -> None:
    text = plots.TABLES.read_text(encoding="utf-8")
    rows = plots.table(text, "scenario")
    rows["clock"]["ours, plain"] = "7.77"
    assert "7.77" in texts(plots.reuse(rows, "light"))
    with pytest.raises(ValueError, match="no table begins with a column 'nothing'"):
        plots.table(text, "nothing")
