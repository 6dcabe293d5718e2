"""Loading, unloading and pinning a model by name. For who may see everything: everybody's waiting depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from start_llm.api.common.request import model_of
from start_llm.api.http import sse
from start_llm.api.http.routes import Reply, Request
from start_llm.api.ops.status import model_body
from start_llm.core.errors import BadRequest
from start_llm.core.jsontext import parse_json
from start_llm.core.service import ModelCard, Service


class Admin:
    """Handlers. Thread-safe as far as `service` is.

    Args:
        check: raises Forbidden for who may not.
    """

    def __init__(self, service: Service, check: Callable[[Request], None]) -> None:
        self._service, self._check = service, check

    def load(self, inbound: Request) -> Reply:
        """``{"model": name}``; answers when it is loaded."""
        return _reply(self._service.load_model(self._name(self._body(inbound))))

    def unload(self, inbound: Request) -> Reply:
        """``{"model": name}``; answers when its KV is on disk and its memory is free."""
        return _reply(self._service.unload_model(self._name(self._body(inbound))))

    def pin(self, inbound: Request) -> Reply:
        """``{"model": name, "pinned": true}``; without ``pinned`` it is pinned."""
        body = self._body(inbound)
        pinned = body.get("pinned", True)
        if not isinstance(pinned, bool):
            raise BadRequest(f"pinned={pinned!r:.40}; give true or false.", param="pinned")
        return _reply(self._service.pin_model(self._name(body), pinned))

    def _body(self, inbound: Request) -> dict[str, Any]:
        self._check(inbound)
        body = parse_json(inbound.body)
        return body if isinstance(body, dict) else {}

    def _name(self, body: dict[str, Any]) -> str:
        name = model_of(body)
        if not name:
            raise BadRequest("model is missing; give a name that GET /v1/models lists.", param="model")
        return name


def _reply(card: ModelCard) -> Reply:
    return Reply(sse.dumps(model_body(card)))
