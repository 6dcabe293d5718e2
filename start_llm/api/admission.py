"""What is decided about a request when its head is known and its body is not."""

from __future__ import annotations

from start_llm.api.http.access import allowed_origin, check_host, check_key, visitor_of
from start_llm.api.http.routes import Request, Routes
from start_llm.api.http.wire import Head
from start_llm.api.ops import page
from start_llm.core.errors import UnsupportedMediaType
from start_llm.core.settings import Settings

OPEN_PATHS = frozenset({"/health"}) | page.OPEN_PATHS


class Admission:
    """Immutable; used on the front thread, so it never waits."""

    def __init__(self, settings: Settings, routes: Routes) -> None:
        self._settings = settings
        self._routes = routes
        self._names = settings.host_names

    def admit(self, head: Head, peer: str) -> Request:
        """The request without its body. Raises StartLLMError: refused, whatever its body is.

        Args:
            peer: the client's address.
        """
        settings = self._settings
        check_host(head.headers, self._names)
        origin = allowed_origin(head.headers)
        options = head.method == "OPTIONS"
        if head.path not in OPEN_PATHS and not options:
            check_key(head.headers, settings.api_key)
        route, params = self._routes.find(head.path)
        handler = None if options else self._routes.handler(route, head.method, head.path)
        reads_body = head.method == "POST" and head.length != 0
        if reads_body:
            _check_content(head, form=route.form)
        return Request(
            head.method,
            head.path,
            head.headers,
            params=params,
            visitor=visitor_of(head.headers, peer, settings.api_key),
            handler=handler,
            methods=route.methods,
            origin=origin,
            lane="quick" if options else route.lane,
            most_bytes=settings.max_body_bytes if reads_body else None,
            query=head.target.partition("?")[2].partition("#")[0],
        )


FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"


def _check_content(head: Head, *, form: bool) -> None:
    kind = head.headers.get("Content-Type", "application/json").split(";", 1)[0].strip().lower()
    if form:
        _check_form(head, kind)
        return
    if kind == FORM and "Origin" not in head.headers and "Sec-Fetch-Site" not in head.headers:
        kind = "application/json"  # `curl -d` says so of whatever it sends; a web page's form would name its origin
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type must be application/json, but is {kind!r}.", param="Content-Type")
    _check_coding(head)


def _check_form(head: Head, kind: str) -> None:
    if kind != MULTIPART:
        raise UnsupportedMediaType(f"Content-Type must be {MULTIPART}, but is {kind!r}.", param="Content-Type")
    if "Origin" not in head.headers and "Sec-Fetch-Site" in head.headers:
        raise UnsupportedMediaType("A web page must send its form by a script, with an Origin.", param="Origin")
    _check_coding(head)


def _check_coding(head: Head) -> None:
    coding = head.headers.get("Content-Encoding", "identity").lower()
    if coding not in {"", "identity"}:
        raise UnsupportedMediaType(
            f"Content-Encoding {coding!r} is not supported; send the body as it is.", param="Content-Encoding"
        )
