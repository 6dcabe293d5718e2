"""The page at `/`: a shell without any data, its script and style, and the feed that fills it.

The shell may be read by everybody, so that a browser can ask its user for the key. The feed has the rules of the API:
host, origin and key are checked, and a visitor sees the requests of its own key only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from start_llm import __version__
from start_llm.api import sse
from start_llm.api.dialect import Feed, Inbound, Reply
from start_llm.api.visitor import Made, Visitor
from start_llm.core.errors import Forbidden
from start_llm.core.service import Service
from start_llm.core.settings import Settings
from start_llm.dashboard.board import Board
from start_llm.dashboard.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/page.js", "/page.css"})
TICK_SECONDS = 0.25
"""Least time between two messages of a feed."""
PULSE_SECONDS = 2.0
"""Most time between two: a browser that has gone is noticed by what cannot be sent."""
AGENTS = ("pi", "claude", "opencode", "codex", "qwen", "openclaw", "cline", "aider")

_SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """Handlers of the page's routes. Thread-safe as far as `service` and `board` are."""

    def __init__(self, settings: Settings, service: Service, metrics: Metrics, board: Board, made: Made) -> None:
        self._service, self._metrics, self._board, self._made = service, metrics, board, made
        templates = Environment(
            loader=PackageLoader("start_llm.dashboard", "page"), autoescape=True, undefined=StrictUndefined
        )
        shell = templates.get_template("page.html.jinja").render(
            version=__version__, agents=AGENTS, needs_key=settings.api_key is not None
        )
        folder = resources.files("start_llm.dashboard") / "page"
        self._files = {
            "/": (shell.encode(), "text/html; charset=utf-8"),
            "/page.js": ((folder / "page.js").read_bytes(), "text/javascript; charset=utf-8"),
            "/page.css": ((folder / "page.css").read_bytes(), "text/css; charset=utf-8"),
        }

    def file(self, inbound: Inbound) -> Reply:
        body, kind = self._files[inbound.path]
        return Reply(body, content_type=kind, headers=_SAFE)

    def feed(self, inbound: Inbound) -> Feed:
        """Raises Forbidden where this visitor may see nothing."""
        visitor = inbound.visitor
        if visitor.scope is None:
            raise Forbidden("A server without API_KEY shows only clients of its own machine what is requested.")
        return Feed(self._messages(visitor))

    def _messages(
        self, visitor: Visitor, sleep: Callable[[float], None] = time.sleep, after: int = 0
    ) -> Iterator[bytes]:
        """Ends when its reader goes, which the edge notices by a message that cannot be sent."""
        while True:
            sight = self._board.sight(after, lambda request_id: self._made.may_see(visitor, request_id))
            after = sight.last
            yield sse.data({"now": sight.now, "ended": sight.ended, "server": self._server()})
            sleep(TICK_SECONDS)
            self._board.wait(sight.version, PULSE_SECONDS - TICK_SECONDS)

    def _server(self) -> dict[str, Any]:
        cards = self._service.models()
        models = [{"id": card.id, "context": card.context, **card.capabilities} for card in cards]
        return {"health": asdict(self._service.health()), "models": models, "figures": self._metrics.figures()}
