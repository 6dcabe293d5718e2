"""Tables, JSON and a picture of what was measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.limits import Limit
from scripts.bench.replay import Replayed, summary
from scripts.bench.runner import Result

Json = dict[str, Any]


def totals(results: list[Result]) -> Json:
    """New and computed tokens over the scenarios whose work could be counted; wrong answers over all."""
    counted = [result for result in results if result.computed is not None and result.skipped is None]
    new, computed = sum(r.new for r in counted), sum(r.computed or 0 for r in counted)
    return {
        "new": new,
        "computed": computed,
        "ratio": computed / new if new else None,
        "requests": sum(len(result.rows) for result in results),
        "wrong": sum(len(result.wrong) for result in results),
        "unexplained": sum(result.unexplained for result in results),
    }


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def scenario_table(title: str, results: list[Result]) -> Table:
    table = Table(title=title)
    for heading in ("scenario", "requests", "new", "computed", "ratio", "first token (ms)", "wrong", "no reason"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for result in results:
        if result.skipped:
            table.add_row(result.name, f"skipped: {result.skipped}")
            continue
        first = statistics.median(row.seconds_to_first for row in result.rows) * 1000
        table.add_row(
            result.name,
            str(len(result.rows)),
            str(result.new),
            "-" if result.computed is None else str(result.computed),
            _ratio(result.ratio),
            f"{first:.0f}",
            str(len(result.wrong)),
            str(result.unexplained),
        )
    all_ = totals(results)
    table.add_section()
    row = (
        all_["requests"],
        all_["new"],
        all_["computed"],
        _ratio(all_["ratio"]),
        "",
        all_["wrong"],
        all_["unexplained"],
    )
    table.add_row("all", *map(str, row))
    return table


def replay_table(title: str, rows: list[Replayed]) -> Table:
    table = Table(title=title)
    for heading in ("run", "requests", "prompt", "optimum", "computed", "computed/optimum", "computed/new", "wrong"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for line in summary(rows):
        ratios = (_ratio(line["computed"] / line["optimum"]), _ratio(line["computed"] / line["new"]))
        counts = (str(line[key]) for key in ("requests", "prompt", "optimum", "computed"))
        table.add_row(line["run"], *counts, *ratios, str(len(line["wrong"])))
    return table


def limits_table(title: str, found: list[Limit]) -> Table:
    table = Table(title=title)
    for heading in ("what", "measured", "limit", "kept", "detail"):
        table.add_column(heading)
    for limit in found:
        kept = "yes" if limit.kept else "NO"
        table.add_row(
            limit.name, f"{limit.value:.4g}", f"{limit.limit:g}", kept, " ".join((limit.detail, *limit.wrong))
        )
    return table


def markdown(table: Table) -> str:
    """The table as Markdown."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|"
    return "\n".join([f"**{table.title}**", "", lines[0], rule, *lines[1:]])


def show(tables: list[Table]) -> None:
    console = Console()
    for table in tables:
        console.print(table)


def complain(results: list[Result]) -> None:
    """Prints every wrong answer."""
    for result in results:
        for wrong in result.wrong:
            Console(stderr=True).print(f"{result.name}: {wrong}", markup=False, highlight=False)


def save(folder: Path, name: str, data: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1), "utf-8")


def plot(folder: Path, runs: dict[str, list[Result]]) -> Path:
    """Computed / new per scenario as bars, one colour per server and model; returns the PNG."""
    import matplotlib  # noqa: PLC0415 - a development dependency, needed for --plot only

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    names = [result.name for result in max(runs.values(), key=len)]
    figure, axes = pyplot.subplots(figsize=(12, 5))
    width = 0.8 / len(runs)
    for number, (label, results) in enumerate(runs.items()):
        ratios = {result.name: result.ratio or 0.0 for result in results}
        places = [i + number * width for i in range(len(names))]
        axes.bar(places, [ratios.get(name, 0.0) for name in names], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("computed / new tokens")
    axes.set_xticks([i + 0.4 for i in range(len(names))], names, rotation=45, ha="right")
    axes.legend()
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "agent_bench.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
