"""The shapes of Ollama's answers; a line of a stream has the shape of the whole answer. See `common.shapes`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

from start_llm.api.common.shapes import CacheReportShape, ChosenLogprobShape


class OllamaFunctionShape(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallShape(TypedDict):
    id: str
    function: OllamaFunctionShape


class OllamaMessageShape(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCallShape]]


class OllamaHeadShape(TypedDict):
    model: str
    created_at: str


class OllamaTimesShape(TypedDict, total=False):
    """Durations are in nanoseconds."""

    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class OllamaRestShape(OllamaTimesShape, total=False):
    """What an answer says beside its words; all but ``done`` and ``logprobs`` in its last line only."""

    done: Required[bool]
    logprobs: list[ChosenLogprobShape]
    done_reason: Literal["stop", "length", "load", "unload"]
    start_llm: CacheReportShape


class OllamaChatShape(OllamaHeadShape, OllamaRestShape):
    message: OllamaMessageShape


class OllamaSaidShape(TypedDict):
    response: str
    thinking: NotRequired[str]


class OllamaGenerateShape(OllamaHeadShape, OllamaSaidShape, OllamaRestShape):
    pass


class OllamaDetailsShape(TypedDict):
    parent_model: str
    format: Literal["mlx"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelShape(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetailsShape


class OllamaRunningShape(OllamaModelShape):
    size_vram: int
    context_length: int
    expires_at: str


class OllamaTagsShape(TypedDict):
    models: list[OllamaModelShape]


class OllamaPsShape(TypedDict):
    models: list[OllamaRunningShape]


OllamaAbility = Literal["completion", "vision", "tools", "thinking"]


class OllamaShowShape(TypedDict):
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetailsShape
    model_info: dict[str, Any]
    capabilities: list[OllamaAbility]


class OllamaPulledShape(TypedDict, total=False):
    """A line of a fetch: how far it is, or how it ended."""

    status: str
    digest: str
    total: int
    completed: int
    error: str


OllamaVersionShape = dict[Literal["version", "start_llm"], str]
