"""Parts of the OpenAPI document that no writer's type says: events of Responses, and what is written by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict, Union

from pydantic import Field

from start_llm.api.common.shapes import REPORT, UNTOLD, ChosenLogprobShape, shape_of
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


_STAGE = {"response": openai.ResponseShape}
_ITEM = {"output_index": int, "item": openai.OutputItem}
_PLACE = {"item_id": str, "output_index": int}
_TEXT = _PLACE | {"content_index": int}
_LISTED = {"logprobs": list[ChosenLogprobShape]}
_PART = _TEXT | {"part": openai.OutputTextShape | openai.ReasoningPartShape}
_SUMMARY = _PLACE | {"summary_index": int}
_SUMMARY_PART = _SUMMARY | {"part": openai.ReasoningPartShape}
_EVENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("created", "in_progress", "completed", "incomplete", "failed"), _STAGE),
    **dict.fromkeys(("output_item.added", "output_item.done"), _ITEM),
    **dict.fromkeys(("content_part.added", "content_part.done"), _PART),
    **dict.fromkeys(("reasoning_summary_part.added", "reasoning_summary_part.done"), _SUMMARY_PART),
    "output_text.delta": _TEXT | {"delta": str} | _LISTED,
    "output_text.done": _TEXT | {"text": str} | _LISTED,
    "reasoning_text.delta": _TEXT | {"delta": str},
    "reasoning_text.done": _TEXT | {"text": str},
    "reasoning_summary_text.delta": _SUMMARY | {"delta": str},
    "reasoning_summary_text.done": _SUMMARY | {"text": str},
    "function_call_arguments.delta": _PLACE | {"delta": str},
    "function_call_arguments.done": _PLACE | {"name": str, "arguments": str},
    "custom_tool_call_input.delta": _PLACE | {"delta": str},
    "custom_tool_call_input.done": _PLACE | {"input": str},
}
"""The fields of each event of a stream, beside its type and number. All types begin with ``response.``."""


def _event(kind: str, fields: dict[str, Any]) -> Any:
    name = kind.title().replace(".", "").replace("_", "")
    whole = {"type": Literal[f"response.{kind}"], "sequence_number": int} | fields  # type: ignore[valid-type]
    return TypedDict(f"Response{name}Shape", whole)  # type: ignore[misc, operator]


ResponseEvent: Any = Annotated[
    Union[tuple(_event(kind, fields) for kind, fields in _EVENTS.items())],  # noqa: UP007 - made of a table
    Field(discriminator="type"),
]
