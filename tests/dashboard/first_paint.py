"""Measures the page's first paint in Chromium, load by load: ``python -m tests.dashboard.first_paint [LOADS]``.

The server runs on the oracle in this process and has answered a few requests. Each load waits a moment for a
quiet machine, so that the page is measured and not its neighbours, and says how busy it was.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.dashboard.browser import Browser, browser
from tests.integration.live import Live, live
from tests.memory_folder import memory_folder
from tests.oracle.build import build_oracle

QUIET_PERCENT = 12.0
QUIET_SECONDS = 0.6
PATIENCE_SECONDS = 5.0
TIMES = """
const paints = Object.fromEntries(performance.getEntriesByType("paint").map((each) => [each.name, each.startTime]));
const load = performance.getEntriesByType("navigation")[0];
return [load.responseStart, load.responseEnd, paints["first-paint"], paints["first-contentful-paint"]];
"""


def wait_for_quiet() -> float:
    """How busy the machine is, in percent of all cores, at the end of the wait."""
    until = time.monotonic() + PATIENCE_SECONDS
    busy = psutil.cpu_percent(QUIET_SECONDS)
    while busy > QUIET_PERCENT and time.monotonic() < until:
        busy = psutil.cpu_percent(QUIET_SECONDS)
    return busy


def load(page: Browser, url: str) -> list[float]:
    """Milliseconds from the begin of a load to: first byte, last byte, first paint, first paint with content."""
    page.open("about:blank")
    busy = wait_for_quiet()
    page.open(url)
    page.until_text("#state", "ready")
    found = page.until(lambda: all(times := page.run(TIMES)) and times, "the first paint")
    cells = "  ".join(f"{value:6.0f}" for value in found)
    print(f"{cells}   ({busy:.0f}% busy before)", flush=True)
    return [float(value) for value in found]


@contextmanager
def serving(folder: Path) -> Iterator[Live]:
    """A server that has answered a few requests."""
    with live(build_oracle(folder / "oracle", "plain"), folder / "cache", drafts="off") as server:
        for number in range(3):
            server.chat([{"role": "user", "content": f"Say {number}. [[long 40]]"}])
        yield server


def main(loads: int) -> None:
    with memory_folder() as folder, browser() as page, serving(folder) as server:
        print("first byte, last byte, first paint, first paint with content: ms")
        paints = [load(page, server.url)[3] for _ in range(loads)]
    print(f"of {loads} loads: median {statistics.median(paints):.0f} ms, worst {max(paints):.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
