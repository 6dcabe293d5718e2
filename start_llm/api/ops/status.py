"""What the server says about itself: health, models, metrics, cache reports; loading and unloading a model by name.

Only the last waits for the model. It is for who may see everything: everybody's waiting depends on it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict

from start_llm import __version__
from start_llm.api.common.request import model_of
from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners
from start_llm.api.http.routes import Reply, Request
from start_llm.core.errors import BadRequest, NotFound
from start_llm.core.jsontext import parse_object
from start_llm.core.service import ModelCard, Service
from start_llm.dashboard.metrics import Metrics, kv_usage
from start_llm.dashboard.request_log import RequestLog
from start_llm.embeddings.service import EncoderService
from start_llm.proxy.nodes import NodeStatus, status_of

SHORT_ID = 6
"""As many characters of an id's end as the terminal shows."""
LONGEST_SHORT_ID = 80


class ModelAbilitiesShape(TypedDict):
    tools: bool
    reasoning: bool
    vision: bool
    images: Literal["shown", "placeholder", "reject"]


class ModelDetailsShape(TypedDict):
    """``facts``: what the checkpoint is, each with where that is known from. Bytes are of the memory now.

    ``loading``: what is being done while it is loaded, and the part of it that is done, 0 to 1.
    """

    state: Literal["ready", "loading", "unloading", "failed", "stored"]
    pinned: bool
    weight_bytes: int
    kv_bytes: int
    context_scale: float
    source: NotRequired[str]
    facts: NotRequired[dict[str, Any]]
    kind: NotRequired[Literal["audio", "embedding"]]
    task: NotRequired[str]
    adapter: NotRequired[str]
    base: NotRequired[str]
    dimensions: NotRequired[int]
    problem: NotRequired[str]
    loading: NotRequired[dict[Literal["step", "part"], Any]]


class ModelShape(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    context_length: int
    max_model_len: int
    meta: dict[Literal["n_ctx"], int]
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"]
    capabilities: ModelAbilitiesShape
    details: ModelDetailsShape


class ModelsShape(TypedDict):
    """A list to OpenAI's clients and to Anthropic's."""

    object: Literal["list"]
    data: list[ModelShape]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


StudioAbility = Literal["tool_use", "vision"]


class StudioModelShape(TypedDict):
    """``type`` of a model that speaks or hears is ``llm``, too: LM Studio knows three."""

    id: str
    object: Literal["model"]
    type: Literal["llm", "vlm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: Literal["mlx"]
    quantization: str
    state: Literal["loaded", "loading", "not-loaded"]
    max_context_length: int
    loaded_context_length: NotRequired[int]
    capabilities: list[StudioAbility]


class StudioModelsShape(TypedDict):
    object: Literal["list"]
    data: list[StudioModelShape]


class PropsShape(TypedDict):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[Literal["vision", "audio"], bool]
    build_info: str


class SlotShape(TypedDict):
    id: int
    n_ctx: int
    is_processing: bool


class LoadShape(TypedDict):
    """``requests``: answered since the start; SGLang has no such field."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    requests: int


class LoadsShape(TypedDict):
    timestamp: str
    version: str
    loads: list[LoadShape]


class RecentRequestsShape(TypedDict):
    """As lines of the request log: places, counts and times, no text of conversations."""

    requests: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Status:
    """Handlers. Thread-safe as far as `service` is."""

    service: Service
    counts: Metrics
    request_log: RequestLog
    owners: RequestOwners
    encoders: EncoderService
    most_running: int  # requests that are computed at the same time

    def health(self, inbound: Request) -> Reply:
        health = self.service.health()
        body: dict[str, Any] = {"status": "ok" if health.ok else "unavailable"} | asdict(health)  # a `HealthShape`
        return Reply(sse.dumps(body), 200 if health.ok else 503, headers={"Cache-Control": "no-store"})

    def node(self, name: str) -> NodeStatus:
        """This server, as the proxy of several nodes sees it."""
        cards = [model_body(card) for card in self._cards()]
        return status_of(name, asdict(self.service.health()), cards, self.loads())

    def metrics(self, inbound: Request) -> Reply:
        return Reply(self.counts.text(), content_type=self.counts.content_type)

    def loads(self, inbound: Request | None = None) -> LoadsShape:
        """How busy the server is, in the fields of SGLang's route of this name, as far as they are measured here."""
        health, figures = self.service.health(), self.counts.figures()
        usage, tokens = kv_usage(figures), int(figures.get("kv_tokens", 0))
        load: LoadShape = {
            "dp_rank": 0,
            "num_running_reqs": health.running,
            "num_waiting_reqs": health.queued,
            "max_running_requests": self.most_running,
            "num_used_tokens": tokens,
            "max_total_num_tokens": round(tokens / usage) if usage else 0,
            "token_usage": round(usage, 4),
            "cache_hit_rate": round(self.counts.hit_rate(), 4),
            "requests": self.counts.answered(),
        }
        return {"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "loads": [load]}

    def models(self, inbound: Request) -> ModelsShape:
        """One body that is a list both to OpenAI's clients and to Anthropic's."""
        cards = self._cards()
        return {
            "object": "list",
            "data": [model_body(card) for card in cards],
            "has_more": False,
            "first_id": cards[0].id if cards else None,
            "last_id": cards[-1].id if cards else None,
        }

    def model(self, inbound: Request) -> ModelShape:
        return {**model_body(self._asked(inbound)), "id": inbound.params[0]}

    def studio_models(self, inbound: Request) -> StudioModelsShape:
        """What LM Studio's clients (Zed) list."""
        cards = [card for card in self._cards() if card.details.get("kind") != "audio"]
        return {"object": "list", "data": [studio_body(card) for card in cards]}

    def studio_model(self, inbound: Request) -> StudioModelShape:
        return {**studio_body(self._asked(inbound)), "id": inbound.params[0]}

    def props(self, inbound: Request) -> PropsShape:
        """The main model, in the fields of llama.cpp's route of this name that clients read."""
        card = self._main()
        return {
            "default_generation_settings": {"n_ctx": card.context},
            "total_slots": self.most_running,
            "model_alias": card.id,
            "model_path": str(card.details.get("source") or card.id),
            "modalities": {"vision": card.vision, "audio": False},
            "build_info": f"start_llm {__version__}",
        }

    def slots(self, inbound: Request) -> list[SlotShape]:
        """A slot for each request that can run at the same time. Whose request runs is not told."""
        running, context = self.service.health().running, self._main().context
        return [{"id": each, "n_ctx": context, "is_processing": each < running} for each in range(self.most_running)]

    def _main(self) -> ModelCard:
        cards = self.service.models.cards()
        if not cards:
            raise NotFound("No model is served yet; /health says why.")
        return cards[0]

    def _asked(self, inbound: Request) -> ModelCard:
        """The card of the model that the path names. Raises NotFound."""
        name, cards = inbound.params[0], self._cards()
        by_id = {card.id: card for card in reversed(cards)}
        card = by_id.get(name) or by_id.get(self.service.models.served_name(name))  # an alias, a name of MODEL_MAP
        if card is not None:
            return card
        names = ", ".join(card.id for card in cards) or "none"
        raise NotFound(f"There is no model {name!r}. Served: {names}.", param="model", code="model_not_found")

    def _cards(self) -> tuple[ModelCard, ...]:
        """Those that answer come first."""
        return (*self.service.models.cards(), *self.encoders.cards())

    def cache_request(self, inbound: Request) -> dict[str, Any]:
        request_id = self._whole_id(inbound)
        visitor = inbound.visitor
        report = self.service.cache_report(request_id) if self.owners.may_see(visitor, request_id) else None
        if report is None:
            raise NotFound(
                f"There is no report of a request {request_id[:80]!r}. Recent ones are kept, "
                "for the key that made them."
            )
        return {"id": request_id} | report.as_dict(words=self.owners.may_read(visitor, request_id))

    def _whole_id(self, inbound: Request) -> str:
        """The id that is meant by the end of one, as the terminal shows it. Raises NotFound where it is of several."""
        request_id = inbound.params[0]
        if len(request_id) < SHORT_ID or len(request_id) > LONGEST_SHORT_ID:
            return request_id
        found = self.owners.ending(inbound.visitor, request_id)
        if len(found) > 1:
            raise NotFound(f"{request_id!r} ends the ids of {len(found)} requests: {', '.join(found[:5])}.")
        return found[0] if found else request_id

    def cache_requests(self, inbound: Request) -> RecentRequestsShape:
        """Those of the asking key. Without API_KEY, a client of this machine that sends no key sees everybody's."""
        visitor = inbound.visitor
        visitor.check_sees_own()
        return {"requests": [each for each in self.request_log.recent() if self.owners.may_see(visitor, each["id"])]}

    # --- loading ---

    def load(self, inbound: Request) -> ModelShape:
        """``{"model": name}``; answers when it is loaded."""
        return model_body(self.service.models.load(_asked_for(inbound)[0]))

    def unload(self, inbound: Request) -> ModelShape:
        """``{"model": name}``; answers when its KV is on disk and its memory is free."""
        return model_body(self.service.models.unload(_asked_for(inbound)[0]))

    def pin(self, inbound: Request) -> ModelShape:
        """``{"model": name, "pinned": true}``; without ``pinned`` it is pinned."""
        name, body = _asked_for(inbound)
        pinned = body.get("pinned", True)
        if not isinstance(pinned, bool):
            raise BadRequest(f"pinned={pinned!r:.40}; give true or false.", param="pinned")
        return model_body(self.service.models.pin(name, pinned))


def _asked_for(inbound: Request) -> tuple[str, dict[str, Any]]:
    """The model that a body names, and the body. Raises BadRequest."""
    body = parse_object(inbound.body)
    name = model_of(body)
    if not name:
        raise BadRequest("model is missing; give a name that GET /v1/models lists.", param="model")
    return name, body


def model_body(card: ModelCard) -> ModelShape:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    where = {name: getattr(card, name) for name in ("state", "pinned", "weight_bytes", "kv_bytes", "context_scale")}
    able: Any = card.capabilities
    details: Any = card.details | where | ({"problem": card.problem} if card.problem else {})
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
        "meta": {"n_ctx": card.context},  # where llama.cpp's clients look (Crush)
        # Anthropic's clients compare these with counts that are told in their own scale.
        "max_input_tokens": round(card.context * card.context_scale),
        "max_tokens": round(card.context * card.context_scale),
        "lifecycle": "active",
        "capabilities": able,
        "details": details,
    }


def studio_body(card: ModelCard) -> StudioModelShape:
    """As LM Studio's REST API v0 tells a model."""
    embeds = card.details.get("kind") == "embedding"
    states: dict[str, Literal["loaded", "loading"]] = {"ready": "loaded", "loading": "loading"}
    able: dict[StudioAbility, bool] = {"tool_use": card.tools, "vision": card.vision}
    body: StudioModelShape = {
        "id": card.id,
        "object": "model",
        "type": "embeddings" if embeds else "vlm" if card.vision else "llm",
        "publisher": card.owned_by,
        "arch": card.family,
        "compatibility_type": "mlx",
        "quantization": "",
        "state": states.get(card.state, "not-loaded"),
        "max_context_length": card.context,
        "capabilities": [name for name, can in able.items() if can and not embeds],
    }
    if card.state == "ready":
        body["loaded_context_length"] = card.context
    return body
