"""``/openapi.json`` and ``/docs``: the API for programs and people. `scripts/openapi_docs.py` makes both files."""

from __future__ import annotations

from importlib import resources

from start_llm.api.http.routes import Reply, Request, Route

FILE, PAGE = "openapi.json", "docs.html"
_FOLDER = resources.files("start_llm.api")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def description_routes() -> list[Route]:
    """The two routes by which the API describes itself."""
    return [Route("/openapi.json", {"GET": _json}), Route("/docs", {"GET": _page})]


def _json(inbound: Request) -> Reply:
    return Reply((_FOLDER / FILE).read_bytes())


def _page(inbound: Request) -> Reply:
    return Reply((_FOLDER / PAGE).read_bytes(), 200, "text/html; charset=utf-8", _PAGE_HEADERS)
