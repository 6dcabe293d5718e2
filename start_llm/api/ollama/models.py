"""``/api/version``, ``/api/tags``, ``/api/ps`` and ``/api/show``: the models, as Ollama's clients read them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

import start_llm
from start_llm.api.common import fields
from start_llm.api.http import sse
from start_llm.api.http.routes import Reply, Request
from start_llm.api.ollama import shapes
from start_llm.api.ollama.chat import named
from start_llm.core.errors import NotFound
from start_llm.core.service import ModelCard, Service

SPOKEN = "0.13.0"
"""The version of Ollama whose API this is: clients ask for one that is new enough."""
FOR_EVER = "2318-01-01T00:00:00Z"


class ShowBody(fields.BodyModel):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """Handlers. Thread-safe as far as `service` is."""

    service: Service

    def version(self, inbound: Request) -> Reply:
        told: shapes.OllamaVersionShape = {"version": SPOKEN, "start_llm": start_llm.__version__}
        return Reply(sse.dumps(told))

    def tags(self, inbound: Request) -> Reply:
        told: shapes.OllamaTagsShape = {"models": [_listed(card) for card in self._cards()]}
        return Reply(sse.dumps(told))

    def running(self, inbound: Request) -> Reply:
        told: shapes.OllamaPsShape = {"models": [_running(card) for card in self._cards() if card.state == "ready"]}
        return Reply(sse.dumps(told))

    def show(self, inbound: Request) -> Reply:
        body, _ = fields.parse_body(ShowBody, inbound.body)
        asked = named(body.model or body.name or "")
        if not asked:
            raise fields.bad("model", "the name of a model", body.model)
        served = self.service.served_name(asked)
        card = next((card for card in self._cards() if card.id == served), None)
        if card is None:
            raise NotFound(f"model {asked[:80]!r} not found; /api/tags lists them.", param="model")
        family = card.family
        abilities: dict[shapes.OllamaAbility, bool] = {
            "completion": True,
            "vision": card.vision,
            "tools": card.tools,
            "thinking": card.reasoning,
        }
        answer: shapes.OllamaShowShape = {
            "modelfile": f"FROM {card.id}",
            "parameters": "",
            "template": "",
            "modified_at": _moment(card),
            "details": _details(card),
            "model_info": {"general.architecture": family, f"{family}.context_length": card.context},
            "capabilities": [name for name, able in abilities.items() if able],
        }
        return Reply(sse.dumps(answer))

    def _cards(self) -> list[ModelCard]:
        """Those that talk."""
        return [card for card in self.service.models() if card.details.get("kind") != "audio"]


def _listed(card: ModelCard) -> shapes.OllamaModelShape:
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": _moment(card),
        "size": card.weight_bytes,
        "digest": hashlib.sha256(f"{card.id} {card.created}".encode()).hexdigest(),
        "details": _details(card),
    }


def _running(card: ModelCard) -> shapes.OllamaRunningShape:
    """When it goes is not known: that depends on what is asked."""
    size, context = card.weight_bytes, card.context
    return {**_listed(card), "size_vram": size, "context_length": context, "expires_at": FOR_EVER}


def _details(card: ModelCard) -> shapes.OllamaDetailsShape:
    return {
        "parent_model": card.details.get("base") or "",
        "format": "mlx",
        "family": card.family,
        "families": [card.family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _moment(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
