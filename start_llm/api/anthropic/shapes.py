"""The shapes of messages and stream events. See `common.shapes`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field

from start_llm.api.common.shapes import CacheReportShape


class ThinkingBlockShape(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlockShape(TypedDict):
    type: Literal["text"]
    text: str


class ToolUseShape(TypedDict):
    type: Literal["tool_use", "server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class FoundShape(TypedDict):
    type: Literal["tool_search_tool_search_result"]
    tool_references: list[dict[Literal["type", "tool_name"], str]]


class NotFoundShape(TypedDict):
    type: Literal["tool_search_tool_result_error"]
    error_code: Literal["invalid_tool_input"]
    error_message: str


class SearchResultShape(TypedDict):
    type: Literal["tool_search_tool_result"]
    tool_use_id: str
    content: FoundShape | NotFoundShape


ContentBlock = Annotated[
    ThinkingBlockShape | TextBlockShape | ToolUseShape | SearchResultShape, Field(discriminator="type")
]


class StartUsageShape(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageUsageShape(StartUsageShape):
    output_tokens_details: dict[Literal["thinking_tokens"], int]
    start_llm: CacheReportShape


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class StopShape(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageHeadShape(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]


class AppliedEditShape(TypedDict):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_input_tokens: int
    cleared_tool_uses: NotRequired[int]
    cleared_thinking_turns: NotRequired[int]


class EditsMadeShape(TypedDict):
    context_management: NotRequired[dict[Literal["applied_edits"], list[AppliedEditShape]]]


class MessageShape(MessageHeadShape, StopShape, EditsMadeShape):
    usage: MessageUsageShape


class BegunMessageShape(MessageHeadShape):
    stop_reason: None
    stop_sequence: None
    usage: StartUsageShape


class MessageStartShape(TypedDict):
    type: Literal["message_start"]
    message: BegunMessageShape


class BlockStartShape(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class BlockTextShape(TypedDict):
    type: Literal["text_delta"]
    text: str


class BlockThinkingShape(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class BlockSignatureShape(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class BlockInputShape(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = Annotated[
    BlockTextShape | BlockThinkingShape | BlockSignatureShape | BlockInputShape, Field(discriminator="type")
]


class BlockDeltaShape(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class BlockStopShape(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDeltaShape(EditsMadeShape):
    type: Literal["message_delta"]
    delta: StopShape
    usage: MessageUsageShape


class PlainEventShape(TypedDict):
    type: Literal["ping", "message_stop"]


MessageEvent = Annotated[
    MessageStartShape | BlockStartShape | BlockDeltaShape | BlockStopShape | MessageDeltaShape | PlainEventShape,
    Field(discriminator="type"),
]


class CountedTokensShape(TypedDict):
    input_tokens: int
    context_management: NotRequired[dict[Literal["original_input_tokens"], int]]
