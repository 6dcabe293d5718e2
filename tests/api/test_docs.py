"""Every route is documented, and every documented route exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from start_llm.api.ops.panels import Panels
from start_llm.api.table import build_routes
from start_llm.core.settings import Settings
from start_llm.dashboard.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def test_docs_and_routes_agree() -> None:
    unused: Any = None
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    panels = Panels(settings, unused, unused, unused)
    routes = build_routes(settings, unused, Metrics(), unused, unused, unused, unused, panels)
    rows = [line.split("|")[1] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    documented = {path for row in rows for path in re.findall(r"/[\w/{}.]*", row)}
    assert documented == set(routes.patterns)
