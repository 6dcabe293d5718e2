"""The page at `/`: a shell without any data, with its style in it, its scripts, and the feed that fills it.

The shell is one answer, and the browser paints it before it asks for a script. It may be read by everybody, so that a
browser can ask its user for the key. The feed has the rules of the API:
host, origin and key are checked, and a visitor sees the requests of its own key only. What the page fetches beside it
is in `panels`.
"""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from start_llm import __version__
from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners, Visitor
from start_llm.api.http.routes import Feed, Reply, Request
from start_llm.api.ops.panels import Panels
from start_llm.core.errors import Forbidden, NotFound
from start_llm.core.service import Service
from start_llm.core.settings import Settings
from start_llm.dashboard.board import Board
from start_llm.dashboard.metrics import Metrics

TICK_SECONDS = 0.25
"""Least time between two messages of a feed."""
PULSE_SECONDS = 2.0
"""Most time between two: a browser that has gone is noticed by what cannot be sent."""
AGENTS = ("pi", "claude", "opencode", "codex", "qwen", "openclaw", "cline", "aider")

_FOLDER = resources.files("start_llm.dashboard") / "page"
_NAMES = sorted(item.name for item in _FOLDER.iterdir() if item.name.endswith(".js"))
_STYLE = (_FOLDER / "page.css").read_text("utf-8")
_STYLE_HASH = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in _NAMES)})

_SAFE = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self'; style-src 'sha256-{_STYLE_HASH}'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """Handlers of the shell and the feed. Thread-safe as far as `service` and `board` are."""

    def __init__(
        self,
        settings: Settings,
        service: Service,
        metrics: Metrics,
        board: Board,
        owners: RequestOwners,
        panels: Panels,
    ) -> None:
        self._service, self._metrics, self._board, self._owners = service, metrics, board, owners
        self._panels = panels
        templates = Environment(
            loader=PackageLoader("start_llm.dashboard", "page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        shell = templates.get_template("page.html.jinja").render(
            version=__version__, agents=AGENTS, needs_key=settings.api_key is not None, style=Markup(_STYLE)
        )
        self._files = {"/": (shell.encode(), "text/html; charset=utf-8")}
        for name in _NAMES:
            self._files[f"/page/{name}"] = ((_FOLDER / name).read_bytes(), "text/javascript; charset=utf-8")

    def file(self, inbound: Request) -> Reply:
        """The shell or a script. Raises NotFound."""
        found = self._files.get(inbound.path)
        if found is None:
            raise NotFound(f"There is nothing at {inbound.path[:200]}.")
        body, kind = found
        return Reply(body, content_type=kind, headers=_SAFE)

    def feed(self, inbound: Request) -> Feed:
        """Raises Forbidden where this visitor may see nothing."""
        visitor = inbound.visitor
        if visitor.scope is None:
            raise Forbidden("A server without API_KEY shows only clients of its own machine what is requested.")
        return Feed(self._messages(visitor, self._panels.sees_all(inbound)))

    def _messages(
        self, visitor: Visitor, sees_all: bool, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[bytes]:
        """Ends when its reader goes, which the edge notices by a message that cannot be sent."""
        after, lines_after = -1, 0
        while True:
            sight = self._board.sight(max(after, 0), lambda request_id: self._owners.may_see(visitor, request_id))
            message: dict[str, Any] = {"now": sight.now, "ended": sight.ended, "server": self._server()}
            message["all"] = sees_all
            if sees_all:
                message["log"], lines_after = self._panels.log.after(lines_after)
                message["pull"] = self._panels.pulls.state()
                if sight.last != after:
                    message["daily"] = self._panels.daily.day()
            after = sight.last
            yield sse.data(message)
            sleep(TICK_SECONDS)
            self._board.wait(sight.version, PULSE_SECONDS - TICK_SECONDS)

    def _server(self) -> dict[str, Any]:
        cards = [card for card in self._service.models() if card.state != "stored"]
        models = [
            {
                "id": card.id,
                "context": card.context,
                "state": card.state,
                "pinned": card.pinned,
                "bytes": card.weight_bytes,
                "problem": card.problem,
                **card.capabilities,
            }
            for card in cards
        ]
        return {"health": asdict(self._service.health()), "models": models, "figures": self._metrics.figures()}
