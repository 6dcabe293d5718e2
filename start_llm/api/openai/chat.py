"""``POST /v1/chat/completions`` and ``/v1/completions``, the way in. The way out is `stream`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from pydantic import FailFast, Field

from start_llm.api.common import fields, parts
from start_llm.api.common.request import read_alike, stop_of
from start_llm.api.common.tools import check_unique, choose, function_of, response_format_of, tool_of
from start_llm.api.http.routes import Request
from start_llm.api.openai.stream import OpenAIExchange
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.limits import CHOICES, PROMPTS
from start_llm.core.messages import Message, Role, Tool, ToolCall
from start_llm.core.request import ChatRequest, ToolChoice
from start_llm.core.service import Service
from start_llm.core.settings import Settings

ROLES = "system, developer, user, assistant, tool or function"
_SCHEMAS = ("guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs", "json_schema")
FORMS = {
    **dict.fromkeys(
        (*_SCHEMAS, "grammar", "regex", "ebnf"), "is not supported; send response_format with a json_schema."
    ),
    "stop_token_ids": "is not supported; send stop.",
    "bad_words": "is not supported; send logit_bias.",
}
"""Fields of other servers that give an answer another form."""


class StreamOptions(fields.BodyModel):
    include_usage: bool | None = None


class ChatMessage(fields.BodyModel):
    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    thinking_blocks: list[Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None


class OlderBody(fields.SamplingBody):
    """The fields of chat completions and of completions."""

    max_tokens: fields.Tokens | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES.most)] | None = None
    best_of: int | None = None
    stop: Any = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def choices(self) -> int:
        """Raises NotSupported."""
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise NotSupported("best_of: more candidates than n are not supported; set n instead.", param="best_of")
        return self.n or 1


class ChatBody(OlderBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    max_completion_tokens: fields.Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


def read_chat(inbound: Request, settings: Settings, service: Service) -> OpenAIExchange:
    """Raises BadRequest, NotSupported."""
    body, data = fields.parse_body(ChatBody, inbound.body)
    fields.refuse(data, FORMS)
    if data.get("web_search_options") not in (None, False):  # an empty object asks for a search, too
        why = "this server searches nothing; send a tool that does."
        raise NotSupported(f"web_search_options: {why}", param="web_search_options")
    if body.modalities and set(body.modalities) != {"text"}:
        raise NotSupported("modalities: only text can be generated.", param="modalities")
    if data.get("continue_final_message") and body.messages[-1].role != "assistant":
        why = "the last message is not the assistant's, so there is nothing to continue; leave it out."
        raise BadRequest(f"continue_final_message: {why}", param="continue_final_message")
    choices = body.choices()
    tools, choice = _tools(body)
    request = ChatRequest(
        **read_alike("chat", body, data, inbound, settings),
        messages=messages_of(body.messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=response_format_of(body.response_format),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=stop_of(body.stop),
        n=choices,
        logprobs=_logprobs(body),
    )
    return OpenAIExchange(request, service, body.includes_usage, int(time.time()))


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: needs logprobs to be true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """`tools`, or the older `functions`, with the choice that belongs to them."""
    if body.tools is None and body.functions is not None:
        old = [function_of(item, path) for path, item in fields.items_of(body.functions, "functions")]
        picked, left = choose(body.function_call, check_unique(old, "functions"), "function_call")
        return left, picked
    tools = [tool_of(item, path) for path, item in fields.items_of(body.tools or [], "tools")]
    picked, left = choose(body.tool_choice, check_unique(tools))
    return left, picked


def messages_of(messages: list[ChatMessage]) -> tuple[Message, ...]:
    """The conversation, in its order; nothing is hoisted or merged."""
    result: list[Message] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role in {"system", "developer", "user"}:
            role: Role = "user" if message.role == "user" else "system"
            result.append(parts.content_of(message.content, f"{path}.content").message(role, name=message.name))
        elif message.role == "assistant":
            result.append(_assistant(message, path, index))
        elif message.role in {"tool", "function"}:
            result.append(_tool(message, path, result))
        else:
            raise fields.bad(f"{path}.role", ROLES, message.role)
    return tuple(result)


def _assistant(message: ChatMessage, path: str, index: int) -> Message:
    content, inline = _assistant_content(message.content, f"{path}.content")
    spoken = _spoken(message, f"{path}.audio", said=bool(content.text))
    beside = [parts.PartContent(text) for text in (message.refusal, spoken) if text and text not in content.text]
    content = parts.join_content([*([content] if content.text or content.attachments else []), *beside])
    calls = [
        _call(item, f"{path}.tool_calls[{j}]", f"call_{index}_{j}") for j, item in enumerate(message.tool_calls or [])
    ]
    if message.function_call is not None:
        calls.append(_function(message.function_call, f"{path}.function_call", f"call_{index}_{len(calls)}"))
    thoughts = _thoughts(message, inline) or None
    return content.message("assistant", reasoning=thoughts, tool_calls=tuple(calls), name=message.name)


def _spoken(message: ChatMessage, path: str, *, said: bool) -> str | None:
    """The words of a spoken answer. Raises NotSupported: it has none, and nothing is `said` in its place."""
    if not message.audio:
        return None
    words = fields.optional_in(message.audio, "transcript", str, path)
    if not words and not said:
        raise NotSupported(f"{path}: recordings are not kept here; send what was said as content.", param=path)
    return words


def _thoughts(message: ChatMessage, inline: str | None) -> str | None:
    """The thinking, in the first of the fields that clients use; `inline`: it stood among the content's parts."""
    if message.reasoning_content is not None:
        return message.reasoning_content
    if isinstance(message.reasoning, str):
        return message.reasoning
    if message.thinking_blocks:
        blocks = [block.get("thinking") for block in message.thinking_blocks if isinstance(block, dict)]
        return "\n".join(block for block in blocks if isinstance(block, str))
    if message.reasoning and inline is None:
        return parts.as_text(message.reasoning)
    return inline


def _assistant_content(content: Any, path: str) -> tuple[parts.PartContent, str | None]:
    """What it says, and the thinking parts that some clients put beside it."""
    if not isinstance(content, list):
        return parts.content_of(content, path), None
    contents, thoughts = [], []
    for where, part in fields.items_of(content, path):
        kind = fields.word(part.get("type")) if isinstance(part, dict) else None
        if kind in {"thinking", "reasoning"}:
            inner = part.get("thinking", part.get("text"))
            thoughts.append(parts.only_text(parts.content_of(inner, f"{where}.{kind}")))
        else:
            contents.append(parts.part_content(part, where))
    return parts.join_content(contents, between=""), "\n".join(thoughts) if thoughts else None


def _call(item: Any, path: str, default_id: str) -> ToolCall:
    call_id = fields.optional_in(fields.object_of(item, path), "id", str, path)
    custom = item.get("custom")
    if isinstance(custom, dict):
        arguments = json.dumps({"input": fields.string_in(custom, "input", f"{path}.custom")}, ensure_ascii=False)
        return ToolCall(call_id or default_id, fields.string_in(custom, "name", f"{path}.custom"), arguments)
    where = f"{path}.function"
    return _function(fields.object_of(item.get("function"), where), where, call_id or default_id)


def _function(function: dict[str, Any], path: str, call_id: str) -> ToolCall:
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = parts.arguments_in(function, "arguments", path)
    else:
        raise fields.bad(f"{path}.arguments", "JSON text or an object", arguments)
    return ToolCall(call_id, fields.string_in(function, "name", path), arguments)


def _tool(message: ChatMessage, path: str, before: list[Message]) -> Message:
    """A result. The older ``function`` role names no call: it answers the last one of that name."""
    call_id = message.tool_call_id
    if call_id is None:
        calls = [call for earlier in before for call in earlier.tool_calls if message.name in {None, call.name}]
        call_id = calls[-1].id if calls else None
    content = parts.content_of(message.content, f"{path}.content", between="\n")
    return content.message("tool", tool_call_id=call_id, name=message.name)


# --- completions: raw prompts ---


RAW = {
    "suffix": "text after the answer is not supported; leave it out.",
    "echo": "the prompt has no logprobs here, so it is not repeated; put it in front of the answer.",
}


class CompletionBody(OlderBody):
    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def read_completion(inbound: Request, settings: Settings, service: Service) -> OpenAIExchange:
    """Raises BadRequest, NotSupported."""
    body, data = fields.parse_body(CompletionBody, inbound.body)
    fields.refuse(data, FORMS | RAW)
    if response_format_of(data.get("response_format")).kind != "text":
        raise NotSupported("response_format: raw prompts have none; ask /v1/chat/completions.", param="response_format")
    choices = body.choices()
    prompt, *others = (text for _, text in parts.texts_of(body.prompt, "prompt", PROMPTS))
    fields.within(PROMPTS, choices * (1 + len(others)), "prompt")
    request = ChatRequest(
        **read_alike("completions", body, data, inbound, settings),
        prompt=prompt,
        more_prompts=tuple(others),
        max_tokens=body.max_tokens,
        stop=stop_of(body.stop),
        n=choices,
        logprobs=body.logprobs,
    )
    return OpenAIExchange(request, service, body.includes_usage, int(time.time()))
