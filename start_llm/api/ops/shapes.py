"""The shapes of what the server says of itself. See `common.shapes`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ModelAbilitiesShape(TypedDict):
    tools: bool
    reasoning: bool
    vision: bool
    images: Literal["shown", "placeholder", "reject"]


class ModelDetailsShape(TypedDict):
    """``facts``: what the checkpoint is, each with where that is known from. Bytes are of the memory now."""

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
