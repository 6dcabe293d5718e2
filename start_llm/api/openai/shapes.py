"""The shapes of answers and stream events: chat completions, completions, Responses. See `common.shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field

from start_llm.api.common.shapes import CacheReportShape, ChosenLogprobShape

# --- chat completions, completions ---


class ChatUsageShape(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]
    start_llm: CacheReportShape


class ChatLogprobsShape(TypedDict):
    content: list[ChosenLogprobShape]
    refusal: None


class ChatCallShape(TypedDict):
    id: str
    type: Literal["function"]
    function: dict[Literal["name", "arguments"], str]


class ChatMessageShape(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatCallShape]]


Finish = Literal["stop", "length", "tool_calls"]


class ChatChoiceShape(TypedDict):
    index: int
    message: ChatMessageShape
    logprobs: ChatLogprobsShape | None
    finish_reason: Finish


class OlderHeadShape(TypedDict):
    id: str
    created: int
    model: str


class OlderPieceShape(OlderHeadShape):
    usage: NotRequired[ChatUsageShape]


class ChatCompletionShape(OlderHeadShape):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceShape]
    usage: ChatUsageShape
    system_fingerprint: None


class ChatCallPieceShape(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: dict[Literal["name", "arguments"], str]


class ChatDeltaShape(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatCallPieceShape]]


class ChatChunkChoiceShape(TypedDict):
    index: int
    delta: ChatDeltaShape
    logprobs: ChatLogprobsShape | None
    finish_reason: Finish | None


class ChatChunkShape(OlderPieceShape):
    """``choices`` is empty in the last one, which carries ``usage`` where ``stream_options`` asks for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoiceShape]


class TextLogprobsShape(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoiceShape(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobsShape | None
    finish_reason: Finish | None


class TextCompletionShape(OlderPieceShape):
    """The whole answer, and each chunk of a stream; of these the last has the ``usage``, where it is asked for."""

    object: Literal["text_completion"]
    choices: list[TextChoiceShape]


# --- Responses ---


class ResponseUsageShape(TypedDict):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int
    start_llm: CacheReportShape


class OutputTextShape(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChosenLogprobShape]


class ReasoningPartShape(TypedDict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessageShape(TypedDict):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextShape]


class OutputReasoningShape(TypedDict):
    type: Literal["reasoning"]
    id: str
    summary: list[ReasoningPartShape]
    status: ItemStatus
    content: NotRequired[list[ReasoningPartShape]]
    encrypted_content: NotRequired[str]


class NamedCallShape(TypedDict):
    id: str
    call_id: str
    name: str
    namespace: NotRequired[str]


class OutputCallShape(NamedCallShape):
    type: Literal["function_call"]
    arguments: str
    status: ItemStatus


class OutputCustomCallShape(NamedCallShape):
    type: Literal["custom_tool_call"]
    input: str
    status: ItemStatus


class OutputSearchShape(TypedDict):
    type: Literal["tool_search_call"]
    id: str
    call_id: str
    execution: Literal["server", "client"]
    arguments: dict[str, Any]
    status: ItemStatus


class OutputFoundShape(TypedDict):
    type: Literal["tool_search_output"]
    id: str
    call_id: str
    execution: Literal["server"]
    status: ItemStatus
    tools: list[dict[str, Any]]


OutputItem = Annotated[
    OutputMessageShape
    | OutputReasoningShape
    | OutputCallShape
    | OutputCustomCallShape
    | OutputSearchShape
    | OutputFoundShape,
    Field(discriminator="type"),
]


class ResponseEchoShape(TypedDict):
    """What repeats the request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[Literal["effort", "summary"], Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class ResponseShape(ResponseEchoShape):
    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsageShape | None


class ResponseEventFields(TypedDict, total=False):
    """The fields of all events of a stream, beside type and number. `scripts/openapi_parts.py` says which has which."""

    response: ResponseShape
    output_index: int
    item: OutputItem
    item_id: str
    content_index: int
    summary_index: int
    part: OutputTextShape | ReasoningPartShape
    delta: str
    text: str
    logprobs: Sequence[ChosenLogprobShape]
    name: str
    arguments: str
    input: str


class DeletedResponseShape(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsShape(TypedDict):
    object: Literal["list"]
    data: list[Any]
    has_more: Literal[False]


class InputTokensShape(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
