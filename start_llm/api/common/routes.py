"""Paths to handlers. A handler answers at once (`Reply`), or hands over an `Exchange`, a `Task` or a `Feed`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote

from start_llm.api.common.dialect import Exchange, Feed, Inbound, Reply, Task
from start_llm.core.errors import MethodNotAllowed, NotFound

Handler = Callable[[Inbound], Reply | Exchange | Task | Feed]


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{\*\}", "(.+)").replace(r"\{\}", "([^/]+)"))


@dataclass(frozen=True, slots=True)
class Route:
    """One path.

    Attributes:
        pattern: holds ``{}`` where a path segment is a parameter, ``{*}`` where one may have slashes.
        quick: answered at once from memory, in the reserved lane.
        feed: goes on until its client goes, in a lane of its own.
        form: its body is a form with files (`multipart/form-data`), not JSON.
    """

    pattern: str
    handlers: Mapping[str, Handler]
    quick: bool = False
    feed: bool = False
    form: bool = False

    def match(self, path: str) -> tuple[str, ...] | None:
        """The parameters, unquoted; ``None`` if `path`, as it came, is another."""
        found = _regex(self.pattern).fullmatch(path)
        return None if found is None else tuple(unquote(value) for value in found.groups())

    @property
    def methods(self) -> list[str]:
        extra = ["HEAD"] if "GET" in self.handlers else []
        return [*self.handlers, *extra, "OPTIONS"]


class WrongMethod(MethodNotAllowed):
    """405 with the methods that the path takes."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed for {path}, only {', '.join(allowed)}.")
        self.allowed = tuple(allowed)


class Routes:
    """The table. Read-only after it is built."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(re.sub(r"{.*?}", "{id}", route.pattern) for route in self._routes)

    def find(self, path: str) -> tuple[Route, tuple[str, ...]]:
        """Raises NotFound."""
        for route in self._routes:
            params = route.match(path)
            if params is not None:
                return route, params
        raise NotFound(f"There is nothing at {path[:200]}. Paths: {', '.join(self.patterns)}.")

    def handler(self, route: Route, method: str, path: str) -> Handler:
        """Raises WrongMethod."""
        handler = route.handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise WrongMethod(method, path, route.methods)
        return handler
