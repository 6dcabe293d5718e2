"""Parts of the OpenAPI document that no writer's type says: events of Responses, and what is written by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict, Union, get_type_hints

from pydantic import Field

from start_llm.api.common.shapes import REPORT, UNTOLD, shape_of
from start_llm.api.openai import shapes as openai
from start_llm.core.report import CacheReport
from start_llm.core.service import Health

HealthShape = shape_of("HealthShape", Health, status=Literal["ok", "unavailable"])
"""``capabilities``: those of the main model; empty until it is loaded."""
ExplainedShape = shape_of("ExplainedShape", CacheReport, UNTOLD, **REPORT, running=int, queued=int)
RequestReportShape = shape_of("RequestReportShape", CacheReport, UNTOLD, **REPORT, id=str)


class EmbeddingShape(TypedDict):
    """``embedding`` is base64 of little-endian float32 where the body asks for that."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsShape(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingShape]
    model: str
    usage: dict[Literal["prompt_tokens", "total_tokens"], int]


class OllamaVectorsShape(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


_PLACE = ("item_id", "output_index")
_TEXT = (*_PLACE, "content_index")
_SUMMARY = (*_PLACE, "summary_index")
_EVENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("created", "in_progress", "completed", "incomplete", "failed"), ("response",)),
    **dict.fromkeys(("output_item.added", "output_item.done"), ("output_index", "item")),
    **dict.fromkeys(("content_part.added", "content_part.done"), (*_TEXT, "part")),
    **dict.fromkeys(("reasoning_summary_part.added", "reasoning_summary_part.done"), (*_SUMMARY, "part")),
    "output_text.delta": (*_TEXT, "delta", "logprobs"),
    "output_text.done": (*_TEXT, "text", "logprobs"),
    "reasoning_text.delta": (*_TEXT, "delta"),
    "reasoning_text.done": (*_TEXT, "text"),
    "reasoning_summary_text.delta": (*_SUMMARY, "delta"),
    "reasoning_summary_text.done": (*_SUMMARY, "text"),
    "function_call_arguments.delta": (*_PLACE, "delta"),
    "function_call_arguments.done": (*_PLACE, "name", "arguments"),
    "custom_tool_call_input.delta": (*_PLACE, "delta"),
    "custom_tool_call_input.done": (*_PLACE, "input"),
}
"""The fields of each event of a stream, beside its type and number. All types begin with ``response.``."""


_KINDS = get_type_hints(openai.ResponseEventFields, include_extras=True)
"""What mypy holds the writer to."""


def _event(kind: str, names: tuple[str, ...]) -> Any:
    fields = {name: _KINDS[name] for name in names}
    name = kind.title().replace(".", "").replace("_", "")
    whole = {"type": Literal[f"response.{kind}"], "sequence_number": int} | fields  # type: ignore[valid-type]
    return TypedDict(f"Response{name}Shape", whole)  # type: ignore[misc, operator]


ResponseEvent: Any = Annotated[
    Union[tuple(_event(kind, names) for kind, names in _EVENTS.items())],  # noqa: UP007 - made of a table
    Field(discriminator="type"),
]
