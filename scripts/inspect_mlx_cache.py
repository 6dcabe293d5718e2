"""Prints what a running server says of its cache: totals from /metrics, recent requests from /v1/cache/requests.

python3.12 install_and_run.py run scripts/inspect_mlx_cache.py --url http://127.0.0.1:8080 --requests 20
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.client import Client

PREFIX = "start_llm_"


def figures(text: str) -> dict[str, float]:
    """Samples of /metrics that are ours, histogram buckets and creation times left out; labels behind the name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX) or sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ", ".join(sample.labels.values())
            found[sample.name.removeprefix(PREFIX) + (f" ({labels})" if labels else "")] = sample.value
    return found


def _metrics_table(values: dict[str, float]) -> Table:
    table = Table(title="totals")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in sorted(values.items()):
        table.add_row(name, f"{value:,.0f}" if value == int(value) else f"{value:,.3f}")
    return table


def _requests_table(requests: list[dict[str, Any]]) -> Table:
    table = Table(title="recent requests, newest first")
    columns = ("id", "session", "prompt", "reused", "computed", "new", "computed_idle", "copied_bytes")
    for heading in (*columns, "why"):
        table.add_column(heading)
    for entry in requests:
        miss = entry.get("miss") or {}
        table.add_row(*(str(entry.get(column, "-")) for column in columns), miss.get("reason", ""))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server")
    parser.add_argument("--key", help="API key; a server without one shows everybody's requests if none is sent")
    parser.add_argument("--requests", type=int, default=20, help="how many recent requests to show")
    options = parser.parse_args(argv)
    client, console = Client(options.url, "", options.key), Console()
    try:
        console.print(_metrics_table(figures(client.get("/metrics").raise_for_status().text)))
        recent = client.get("/v1/cache/requests").raise_for_status().json()["requests"]
        console.print(_requests_table(recent[: options.requests]))
    except httpx.HTTPError as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
