"""A request, the route that answers it, and the answers that are known here. What a handler computes is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal
from urllib.parse import unquote

from start_llm.api.http.access import NOBODY, Visitor
from start_llm.core.errors import MethodNotAllowed, NotFound

Lane = Literal["work", "quick", "feed"]
"""Which threads answer: ``quick`` from memory at once, ``feed`` until the client goes, ``work`` all the rest."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose head was read and let in."""

    method: str
    path: str  # without query and without slashes at its end. `query`: what follows ``?``, as it was sent
    headers: Mapping[str, str]  # case-insensitive
    body: bytes = b""  # empty until all of it has arrived
    params: tuple[str, ...] = ()  # what the route's path holds, e.g. a response's id
    received: float = 0.0  # ``time.monotonic()`` when it was complete, in seconds
    visitor: Visitor = NOBODY
    handler: Handler | None = None  # ``None`` for OPTIONS, which is answered with the `methods` that the path takes
    methods: tuple[str, ...] = ()
    origin: str | None = None  # of the web page that asks, if one asks and may
    lane: Lane = "work"
    # of the body; ``None``: no body is read, the connection closes behind the answer if one comes
    most_bytes: int | None = None
    query: str = ""
    has_left: Callable[[], bool] = lambda: False  # whether the client has closed its connection


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feed:
    """An answer that goes on: until the client goes, or its messages end."""

    messages: Iterator[bytes]
    content_type: str = "text/event-stream; charset=utf-8"


Answer = Reply | Feed | Mapping[str, object] | list[Any]
"""What a handler returns; an object or a list goes out as JSON."""
Handler = Callable[[Request], Any]
"""Returns an `Answer`, or something that `api.handler` runs."""


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{\*\}", "(.+)").replace(r"\{\}", "([^/]+)"))


@dataclass(frozen=True, slots=True)
class Route:
    """One path: ``{}`` is a parameter, ``{*}`` one with slashes. `form`: multipart. `private`: for who sees all."""

    pattern: str
    handlers: Mapping[str, Handler]
    lane: Lane = "work"
    form: bool = False
    private: bool = False

    def match(self, path: str) -> tuple[str, ...] | None:
        """The parameters, unquoted; ``None`` if `path`, as it came, is another."""
        found = _regex(self.pattern).fullmatch(path)
        return None if found is None else tuple(unquote(value) for value in found.groups())

    @property
    def methods(self) -> tuple[str, ...]:
        return (*self.handlers, *(["HEAD"] if "GET" in self.handlers else []), "OPTIONS")


class Routes:
    """The table. Read-only after it is built."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(re.sub(r"{.*?}", "{id}", route.pattern) for route in self._routes)

    def find(self, path: str) -> tuple[Route, tuple[str, ...]]:
        """Raises NotFound."""
        for route in self._routes:
            params = route.match(path)
            if params is not None:
                return route, params
        near = get_close_matches(path[:200], self.patterns, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise NotFound(f"There is nothing at {path[:200]}. {hint}/docs lists all paths.")

    def handler(self, route: Route, method: str, path: str) -> Handler:
        """Raises MethodNotAllowed."""
        handler = route.handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            only = ", ".join(route.methods)
            raise MethodNotAllowed(f"{method} is not allowed for {path}, only {only}.", route.methods)
        return handler
