"""``/v1/responses``, the way in: bodies, items, stored responses. The way out is `responses_stream`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import Field

from start_llm.api.common import fields
from start_llm.api.common.request import read_alike, stop_of
from start_llm.api.common.tools import response_format_of
from start_llm.api.http.access import user_of
from start_llm.api.http.routes import Request
from start_llm.api.openai import shapes
from start_llm.api.openai.responses_items import BRINGS_TOOLS, conversation_of
from start_llm.api.openai.responses_store import OwnResponses, ResponsesStore, StoredResponse
from start_llm.api.openai.responses_stream import REASONING, SUMMARY, ResponsesExchange, telling
from start_llm.api.openai.responses_tools import Toolbox, toolbox
from start_llm.core.errors import NotFound
from start_llm.core.limits import MESSAGES
from start_llm.core.messages import Message
from start_llm.core.request import ChatRequest
from start_llm.core.service import Service
from start_llm.core.settings import Settings

log = logging.getLogger(__name__)

REFUSED = {
    "background": "answers in the background are not supported; leave it out or set it to false.",
    "conversation": "conversations are not kept; use previous_response_id.",
    "prompt": "stored prompt templates are not supported; send instructions and input.",
}


class ResponsesBody(fields.SamplingBody):
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: fields.Tokens | None = None
    max_tool_calls: fields.Tokens | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: Any = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def read_responses(inbound: Request, settings: Settings, service: Service, store: OwnResponses) -> ResponsesExchange:
    """Raises BadRequest, NotFound (the previous response), NotSupported."""
    body, data = fields.parse_body(ResponsesBody, inbound.body)
    fields.refuse(data, REFUSED)
    store = store.of_user(user_of(data))
    items = [*_previous(body.previous_response_id, store), *_input(body.input)]
    fields.within(MESSAGES, len(items), "input")
    messages, silent = conversation_of(items)
    tools = _tools(body, items)
    if body.instructions:
        messages = (Message("system", body.instructions), *messages)
    include = set(body.include or [])
    wants_logprobs = "message.output_text.logprobs" in include or bool(body.top_logprobs)
    request = ChatRequest(
        **read_alike("responses", body, data, inbound, settings),
        messages=messages,
        tools=tools.tools,
        search=tools.search,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=response_format_of((body.text or {}).get("format"), "text.format"),
        max_tokens=body.max_output_tokens,
        stop=stop_of(body.stop),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        continued=body.previous_response_id is not None,
    )
    thought = body.reasoning or {}
    thinking = SUMMARY if thought.get("summary") or thought.get("generate_summary") else REASONING
    sealed = "reasoning.encrypted_content" in include
    keep = store if body.store is not False and store.enabled else None
    if body.store:
        _check_storable(store)
    echo = _echo(body, data, tools.notes, silent, keep is not None)
    return ResponsesExchange(
        request, service, echo, items, thinking, sealed, time.time(), keep, bool(body.store), tools.origin
    )


def _check_storable(own: OwnResponses) -> None:
    """Before anything is computed: what asks to be stored and cannot be is refused."""
    if own.owner is None:
        why = "a server without API_KEY stores responses for programs of its own machine only"
        raise fields.bad("store", f"false or left out: {why}", True)
    with telling("store"):
        own.store.check()


def _input(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list) and value:
        return value
    raise fields.bad("input", "a string or a list of items that is not empty", value)


def _previous(response_id: str | None, store: OwnResponses) -> list[Any]:
    """What was said up to and with the previous response; its instructions are not carried over."""
    if response_id is None:
        return []
    with telling("previous_response_id"):
        stored = store.get(response_id)
    if stored is None:
        raise NotFound(
            f"previous_response_id: there is no stored response {fields.short(response_id)}; it may have expired.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*stored.items, *stored.body["output"]]


def _tools(body: ResponsesBody, items: list[Any]) -> Toolbox:
    brought: list[tuple[str, Any]] = []
    for path, item in fields.items_of(items, "input"):
        if isinstance(item, dict) and item.get("type") in BRINGS_TOOLS:
            brought += fields.items_of(item.get("tools") or [], f"{path}.tools", "a list of tools")
    tools = toolbox([*fields.items_of(body.tools or [], "tools")], body.tool_choice, brought)
    if tools.notes:
        log.info("tools passed over: %s", ", ".join(tools.notes))
    return tools


def _echo(
    body: ResponsesBody, data: Mapping[str, Any], tools: Sequence[str], items: Sequence[str], stored: bool
) -> shapes.ResponseEchoShape:
    """The fields of a response that say what was asked. `tools`, `items`: what the model was not shown."""
    metadata = {name: value for name, value in (body.metadata or {}).items() if isinstance(value, str)}
    why = {
        "These tools were passed over, they would run elsewhere": tools,
        "These items are not shown to the model, only another server can read them": items,
    }
    parts = [f"{text}: {', '.join(places)}" for text, places in why.items() if places]
    if parts:
        note = ". ".join(parts)
        metadata["start_llm_warnings"] = note if len(note) <= 512 else note[:509] + "..."
    reasoning = body.reasoning or {}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": stored,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class StoredResponses:
    """``GET`` and ``DELETE /v1/responses/{id}``, and the input items of one."""

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    def get(self, inbound: Request) -> dict[str, Any]:
        return self._find(inbound).body

    def delete(self, inbound: Request) -> shapes.DeletedResponseShape:
        response_id = inbound.params[0]
        with telling("response_id"):
            deleted = self._own(inbound).delete(response_id)
        if not deleted:
            raise _missing(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def input_items(self, inbound: Request) -> shapes.InputItemsShape:
        return {"object": "list", "data": self._find(inbound).items, "has_more": False}

    def _own(self, inbound: Request) -> OwnResponses:
        """Of the key, and of the user that ``?user=`` names."""
        return self._store.of(inbound.visitor.scope).of_user(parse_qs(inbound.query).get("user", [None])[0])

    def _find(self, inbound: Request) -> StoredResponse:
        """Whose it is makes no difference in words: that there is one is nobody else's business."""
        response_id = inbound.params[0]
        with telling("response_id"):
            stored = self._own(inbound).get(response_id)
        if stored is None:
            raise _missing(response_id)
        return stored


def _missing(response_id: str) -> NotFound:
    return NotFound(f"There is no stored response {fields.short(response_id)}.", param="response_id")
