"""Every route is documented, and every documented route exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from start_llm.api.media.audio import AudioRoutes
from start_llm.api.media.embeddings import Encodings
from start_llm.api.openai.responses import StoredResponses
from start_llm.api.ops.page import Page
from start_llm.api.ops.status import Status
from start_llm.api.table import Dialects, build_routes
from start_llm.core.settings import Settings
from start_llm.dashboard.board import Board

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def test_docs_and_routes_agree() -> None:
    unused: Any = None
    status = Status(unused, unused, unused, unused, unused, 0)
    page = Page(Settings(_env_file=None), status, Board(unused), unused, "")  # type: ignore[call-arg]
    dialects, stored = Dialects(unused, unused, unused, unused), StoredResponses(unused)
    routes = build_routes(dialects, stored, page, status, Encodings(unused, unused), AudioRoutes(unused, unused))
    rows = [line.split("|")[1] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    documented = {path for row in rows for path in re.findall(r"/[\w/{}.]*", row)}
    assert documented == set(routes.patterns)
