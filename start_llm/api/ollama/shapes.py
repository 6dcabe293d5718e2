"""The shapes of Ollama's answers; a line of a stream has the shape of the whole answer. See `common.shapes`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

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


class _OllamaAnswerShape(TypedDict):
    """What follows ``done_reason`` stands in the last line only. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[ChosenLogprobShape]]
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    start_llm: NotRequired[CacheReportShape]


class OllamaChatShape(_OllamaAnswerShape):
    message: OllamaMessageShape


class OllamaGenerateShape(_OllamaAnswerShape):
    response: str
    thinking: NotRequired[str]


class OllamaVectorsShape(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


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


class OllamaShowShape(TypedDict):
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetailsShape
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "vision", "tools", "thinking"]]


class OllamaVersionShape(TypedDict):
    version: str
    start_llm: str
