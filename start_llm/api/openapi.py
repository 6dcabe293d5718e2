"""``/openapi.json`` and ``/docs``: the API for programs and people. `scripts/openapi_docs.py` makes the document."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from start_llm.api.http.routes import Reply, Request, Route

FILE = "openapi.json"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def description_routes() -> list[Route]:
    """The two routes by which the API describes itself."""
    return [Route("/openapi.json", {"GET": _json}), Route("/docs", {"GET": _page})]


def _document() -> bytes:
    return (resources.files("start_llm.api") / FILE).read_bytes()


def _json(inbound: Request) -> Reply:
    return Reply(_document())


def _page(inbound: Request) -> Reply:
    page = "".join(_lines(json.loads(_document())))
    return Reply(page.encode(), 200, "text/html; charset=utf-8", _PAGE_HEADERS)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """The document as a page without scripts and styles, which the strictest policy lets through."""
    title = f"{document['info']['title']} {document['info']['version']}"
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}: API</title><h1>{title}</h1>"
    yield "<p>The same for programs: <a href=/openapi.json>openapi.json</a>. <a href=#bodies>Bodies and answers</a>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            yield f"<h2 id={operation['operationId']}>{method.upper()} {html.escape(path)}</h2>"
            yield f"<p>{html.escape(operation['summary'])}"
            for media in operation.get("requestBody", {}).get("content", {}).values():
                if name := media["schema"].get("$ref", "").rpartition("/")[2]:
                    yield f"<p>Body: <a href=#{name}>{name}</a>"
            for media in operation["responses"]["200"]["content"].values():
                if name := media["schema"].get("$ref", "").rpartition("/")[2]:
                    yield f"<p>Answer: <a href=#{name}>{name}</a>"
            statuses = ", ".join(operation["responses"])
            yield f"<p>Answers: {', '.join(operation['responses']['200']['content'])}. Statuses: {statuses}."
    yield "<h1 id=bodies>Bodies and answers</h1>"
    for name, schema in document["components"]["schemas"].items():
        yield f"<h2 id={name}>{name}</h2><ul>"
        for part, what in schema.get("properties", {}).items():
            needed = ", required" if part in schema.get("required", ()) else ""
            yield f"<li><b>{html.escape(part)}</b>{needed}: <code>{html.escape(json.dumps(what))}</code>"
        yield "</ul>"
