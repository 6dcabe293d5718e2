"""The random bodies know every field and word of the dialects: what is new there has to be sent, too."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import pytest

from start_llm.api.anthropic.messages import MessageIn, MessagesBody, OutputConfig
from start_llm.api.common.parts import IMAGE_TYPES, TEXT_TYPES
from start_llm.api.common.request import FIELDS as THINKING
from start_llm.api.http.access import USER_FIELDS
from start_llm.api.media.audio import SpeechBody, TranscriptionBody
from start_llm.api.media.embeddings import EmbeddingsBody
from start_llm.api.openai.chat import ChatBody, ChatMessage, CompletionBody, StreamOptions
from start_llm.api.openai.responses import REFUSED, ResponsesBody
from start_llm.api.openai.responses_tools import PASSED_OVER, SERVED
from start_llm.api.table import BLOCKS as TOLD_BY
from start_llm.api.table import CHAT_FIELDS, MESSAGES_FIELDS
from start_llm.core.protocol import SESSION_FIELDS
from tests.fuzz import bodies
from tests.fuzz.tape import Record

READ: dict[str, tuple[Record, AbstractSet[str]]] = {
    "chat": (bodies.chat, {*ChatBody.model_fields, *CHAT_FIELDS, *SESSION_FIELDS, *USER_FIELDS, *THINKING}),
    "a message": (bodies.message, {*ChatMessage.model_fields}),
    "completions": (bodies.completions, {*CompletionBody.model_fields, *SESSION_FIELDS}),
    "messages": (bodies.messages, {*MessagesBody.model_fields, *MESSAGES_FIELDS, *THINKING}),
    "responses": (bodies.responses, {*ResponsesBody.model_fields, *REFUSED, *SESSION_FIELDS}),
    "embeddings": (bodies.embeddings, {*EmbeddingsBody.model_fields}),
    "speech": (bodies.speech, {*SpeechBody.model_fields}),
    "transcription": (bodies.transcription, {*TranscriptionBody.model_fields}),
    "one of Anthropic's messages": (bodies.said_message, {*MessageIn.model_fields}),
    "output_config": (bodies.output_config, {*OutputConfig.model_fields}),
    "stream_options": (bodies.stream_options, {*StreamOptions.model_fields}),
}


@pytest.mark.parametrize("name", READ)
def test_every_field_that_is_read_is_sent(name: str) -> None:
    sent, read = READ[name]
    assert read <= sent.names


def test_every_type_that_is_known_is_sent() -> None:
    assert {*bodies.ELSEWHERE} == PASSED_OVER and {*bodies.TOOL_TYPES} >= SERVED
    assert {*bodies.BLOCKS} >= TOLD_BY and {*bodies.IMAGES} == IMAGE_TYPES and {*bodies.PARTS} >= TEXT_TYPES
