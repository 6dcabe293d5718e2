"""Draws the plots of the README from the tables of ``docs/benchmarks.md``, light and dark. It measures nothing.

    python3.12 install_and_run.py run scripts/plots.py

writes ``reuse-light.svg``, ``reuse-dark.svg`` and the same of ``sessions`` to ``docs/images``. The tables are the only
source: a test draws the plots again and compares.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"

#: What clients do between two turns: the scenario of the table, and how the plot calls it.
SCENARIOS = {
    "clock": "a clock in the system text",
    "message_id": "an id in each message",
    "restart": "the server was restarted",
    "reasoning_doubled": "reasoning sent back twice",
    "sub_agent_with_history": "sub-agents that get the history",
    "compaction": "a summary is asked for",
    "subagents": "sub-agents",
    "reasoning_stripped": "reasoning left out",
    "append": "the history only grows",
    "**all**": "all 18 scenarios",
}
#: The row of the table of recorded sessions that is drawn.
SESSIONS = "3, 262,144"
COLOURS = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "ours": "#0a7d5a", "theirs": "#9a6700"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "ours": "#3fb68b", "theirs": "#d4a72c"},
}


def table(text: str, heading: str) -> dict[str, dict[str, str]]:
    """The first Markdown table whose first column is called `heading`.

    Returns:
        Each row by its first cell: the other cells by their column's name.

    Raises:
        ValueError: there is no such table.
    """
    lines = iter(text.splitlines())
    for line in lines:
        names = _cells(line)
        if names[:1] == [heading]:
            next(lines)  # the rule below the names
            rows = {}
            for row in lines:
                if not row.startswith("|"):
                    break
                first, *others = _cells(row)
                rows[first] = dict(zip(names[1:], others, strict=True))
            return rows
    raise ValueError(f"no table begins with a column {heading!r}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def reuse(rows: dict[str, dict[str, str]], theme: str) -> str:
    """The plot of computed tokens per new token, ours and mlx_lm.server's, as SVG."""
    with _style(theme):
        figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
        for offset, column, colour, name in (
            (-0.2, "ours, plain", COLOURS[theme]["ours"], "start_llm"),
            (0.2, "mlx_lm.server, plain", COLOURS[theme]["theirs"], "mlx_lm.server"),
        ):
            values = [float(rows[scenario][column].strip("*")) for scenario in SCENARIOS]
            bars = axes.barh([row + offset for row in range(len(values))], values, 0.36, color=colour, label=name)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
        axes.set_yticks(range(len(SCENARIOS)), list(SCENARIOS.values()))
        axes.set_xlabel("tokens computed for each new token (1 is the least)")
        axes.legend(frameon=False, loc="lower right")
        return _svg(figure, axes, theme)


def sessions(rows: dict[str, dict[str, str]], theme: str) -> str:
    """The plot of what policies compute on recorded sessions in little memory, as SVG."""
    values = {policy: float(cell) for policy, cell in rows[SESSIONS].items() if cell.replace(".", "").isdigit()}
    colours = [COLOURS[theme]["ours" if policy.startswith("start_llm") else "theirs"] for policy in values]
    with _style(theme):
        figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
        bars = axes.barh(range(len(values)), list(values.values()), 0.6, color=colours)
        axes.bar_label(bars, [f"{value:.2f}" for value in values.values()], padding=3)
        axes.set_yticks(range(len(values)), list(values))
        axes.set_xlabel(f"computed / optimum, sessions at once: {SESSIONS}")
        return _svg(figure, axes, theme)


def _style(theme: str) -> AbstractContextManager[None]:
    text = COLOURS[theme]["text"]
    style = {
        "svg.fonttype": "none",  # text stays text: small, and a reader can search it
        "svg.hashsalt": "start_llm",  # the same picture gives the same bytes
        "font.family": "sans-serif",
        "font.size": 11,
    }
    parts = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    return mpl.rc_context(style | dict.fromkeys(parts, text))


def _svg(figure: Any, axes: Any, theme: str) -> str:
    """The first bar at the top, and a line at 1."""
    axes.invert_yaxis()
    axes.axvline(1, color=COLOURS[theme]["grid"], linewidth=1, zorder=0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in drawing.getvalue().splitlines()) + "\n"


def main() -> None:
    text = TABLES.read_text(encoding="utf-8")
    for theme in COLOURS:
        for name, (heading, draw) in PLOTS.items():
            (IMAGES / f"{name}-{theme}.svg").write_text(draw(table(text, heading), theme), encoding="utf-8")


#: By the name of the picture's file: the first column of its table, and what draws it.
PLOTS = {"reuse": ("scenario", reuse), "sessions": ("sessions at once, tokens of KV in memory", sessions)}


if __name__ == "__main__":
    mpl.use("Agg")
    main()
