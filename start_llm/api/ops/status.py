"""What the server says about itself: health, models, metrics, cache reports. Never waits for the model."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners
from start_llm.api.http.routes import Reply, Request
from start_llm.core.errors import Forbidden, NotFound
from start_llm.core.media import Encoders
from start_llm.core.service import ModelCard, Service
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.request_log import RequestLog

SHORT_ID = 6
"""As many characters of an id's end as the terminal shows."""
LONGEST_SHORT_ID = 80


class Status:
    """Handlers of the GET routes. Thread-safe as far as `service` is."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        request_log: RequestLog,
        owners: RequestOwners,
        encoders: Encoders | None = None,
    ) -> None:
        self._encoders = encoders
        self._service = service
        self._metrics = metrics
        self._request_log = request_log
        self._owners = owners

    def health(self, inbound: Request) -> Reply:
        health = self._service.health()
        body = {"status": "ok" if health.ok else "unavailable"} | asdict(health)
        return Reply(sse.dumps(body), 200 if health.ok else 503, headers={"Cache-Control": "no-store"})

    def metrics(self, inbound: Request) -> Reply:
        return Reply(self._metrics.text(), content_type=self._metrics.content_type)

    def models(self, inbound: Request) -> Reply:
        """One body that is a list both to OpenAI's clients and to Anthropic's."""
        cards = self._cards()
        body = {
            "object": "list",
            "data": [model_body(card) for card in cards],
            "has_more": False,
            "first_id": cards[0].id if cards else None,
            "last_id": cards[-1].id if cards else None,
        }
        return Reply(sse.dumps(body))

    def model(self, inbound: Request) -> Reply:
        name = inbound.params[0]
        cards = self._cards()
        for card in cards:
            if card.id == name:
                return Reply(sse.dumps(model_body(card)))
        meant = self._service.served_name(name)  # an alias, a name of MODEL_MAP
        for card in cards:
            if card.id == meant:
                return Reply(sse.dumps(model_body(card) | {"id": name}))
        names = ", ".join(card.id for card in cards) or "none"
        raise NotFound(f"There is no model {name!r}. Served: {names}.", param="model", code="model_not_found")

    def _cards(self) -> tuple[ModelCard, ...]:
        """Those that answer come first."""
        return (*self._service.models(), *(() if self._encoders is None else self._encoders.cards()))

    def cache_request(self, inbound: Request) -> Reply:
        request_id = self._whole_id(inbound)
        report = self._service.cache_report(request_id) if self._owners.may_see(inbound.visitor, request_id) else None
        if report is None:
            raise NotFound(
                f"There is no report of a request {request_id[:80]!r}. Recent ones are kept, "
                "for the key that made them."
            )
        return Reply(sse.dumps({"id": request_id} | report.as_dict()))

    def _whole_id(self, inbound: Request) -> str:
        """The id that is meant by the end of one, as the terminal shows it. Raises NotFound where it is of several."""
        request_id = inbound.params[0]
        if len(request_id) < SHORT_ID or len(request_id) > LONGEST_SHORT_ID:
            return request_id
        found = self._owners.ending(inbound.visitor, request_id)
        if len(found) > 1:
            raise NotFound(f"{request_id!r} ends the ids of {len(found)} requests: {', '.join(found[:5])}.")
        return found[0] if found else request_id

    def cache_requests(self, inbound: Request) -> Reply:
        """Those of the asking key. Without API_KEY, a client of this machine that sends no key sees everybody's."""
        visitor = inbound.visitor
        if visitor.scope is None:
            raise Forbidden("A server without API_KEY tells only clients of its own machine what was requested.")
        recent = [entry for entry in self._request_log.recent() if self._owners.may_see(visitor, entry["id"])]
        return Reply(sse.dumps({"requests": recent}))


def model_body(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "type": "model",
        "display_name": card.id,
        "created_at": created,
        "context_length": card.context,
        "max_model_len": card.context,
        "capabilities": card.capabilities,
        "details": card.details | _loaded(card),
    }


def _loaded(card: ModelCard) -> dict[str, Any]:
    """Where the model is: on disk, in memory, between the two."""
    details: dict[str, Any] = {"state": card.state, "pinned": card.pinned, "weight_bytes": card.weight_bytes}
    details["kv_bytes"] = card.kv_bytes
    details["context_scale"] = card.context_scale
    return details | ({"problem": card.problem} if card.problem else {})
