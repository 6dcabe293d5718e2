"""``POST /api/chat`` and ``/api/generate``, the way in. The way out is `stream`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from start_llm.api.common import fields
from start_llm.api.common.request import model_of, read_alike, stop_of
from start_llm.api.common.tools import check_unique, tool_of
from start_llm.api.http.routes import Request
from start_llm.api.ollama import shapes
from start_llm.api.ollama.stream import OllamaChatAnswer, OllamaGenerateAnswer, head_of
from start_llm.core.errors import NotSupported
from start_llm.core.limits import LOOK_BACK
from start_llm.core.messages import Attachment, Message, Role, ToolCall
from start_llm.core.request import ChatRequest, Dialect, ResponseFormat
from start_llm.core.service import Service
from start_llm.core.settings import Settings

ROLES = "system, user, assistant or tool"
THINK = ("low", "medium", "high", "max")
NEWEST = ":latest"
"""The tag of a name without one."""


class Options(fields.Drawn):
    """What of Ollama's options can be done here. Others (``num_gpu``, ``num_ctx``, ...) belong to its own engine."""

    place: ClassVar[str] = "options."
    repetition_penalty: Annotated[float | None, Field(gt=0, le=2)] = Field(default=None, alias="repeat_penalty")
    repetition_context_size: Annotated[int | None, Field(ge=-1, le=LOOK_BACK.most)] = Field(
        default=None, alias="repeat_last_n"
    )
    num_predict: Annotated[int, Field(ge=-2, le=2**53)] | None = None
    stop: Any = None

    @field_validator("top_k", "repetition_context_size", "seed", "num_predict", mode="before")
    @classmethod
    def _as_whole(cls, value: Any) -> Any:
        """Ollama reads all numbers as floats: clients may send 40.0 where a whole number is meant."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("repetition_context_size")
    @classmethod
    def _all_of_it(cls, value: int | None) -> int | None:
        return LOOK_BACK.most if value == -1 else value


class OllamaBody(fields.BodyModel):
    """The fields of both. Without ``stream`` the answer is a stream."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def unloads(self) -> bool:
        return self.keep_alive in (0, "0", "0s", "0m")


class OllamaMessage(fields.BodyModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaBody):
    messages: list[OllamaMessage] | None = None
    tools: list[Any] | None = None


class GenerateBody(OllamaBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


def read_chat(inbound: Request, settings: Settings, service: Service) -> OllamaChatAnswer | shapes.OllamaChatShape:
    """Raises BadRequest, NotSupported. A body without messages loads the model, or unloads it."""
    body, data = fields.parse_body(OllamaChatBody, inbound.body)
    data = _known_fields(body, data)
    if not body.messages:
        name, rest = _load(body, data, inbound, service)
        return {**head_of(name), "message": {"role": "assistant", "content": ""}, **rest}
    tools = check_unique([tool_of(item, path) for path, item in fields.items_of(body.tools or [], "tools")])
    given = {"messages": messages_of(body.messages), "tools": tools}
    return OllamaChatAnswer(_request("ollama", body, data, inbound, settings, **given), service)


def read_generate(
    inbound: Request, settings: Settings, service: Service
) -> OllamaGenerateAnswer | shapes.OllamaGenerateShape:
    """Raises BadRequest, NotSupported. A body without a prompt loads the model, or unloads it."""
    body, data = fields.parse_body(GenerateBody, inbound.body)
    for name in ("suffix", "template", "context"):
        if getattr(body, name):
            raise NotSupported(f"{name}: is not supported; send the conversation to /api/chat.", param=name)
    data = _known_fields(body, data)
    if not body.prompt and not body.images:
        name, rest = _load(body, data, inbound, service)
        said: shapes.OllamaSaidShape = {"response": ""}
        return {**head_of(name), **said, **rest}
    if body.raw:
        if body.images or body.system:
            raise NotSupported("raw: takes neither images nor a system text.", param="raw")
        request = _request("completions", body, data, inbound, settings, prompt=body.prompt)
        return OllamaGenerateAnswer(request, service)
    messages = [Message("system", body.system)] if body.system else []
    messages.append(Message("user", body.prompt or "", attachments=_images(body.images, "images")))
    request = _request("ollama", body, data, inbound, settings, messages=tuple(messages))
    return OllamaGenerateAnswer(request, service)


def named(name: str) -> str:
    """A model's name without the tag that says nothing."""
    return name.removesuffix(NEWEST)


def _known_fields(body: OllamaBody, data: dict[str, Any]) -> dict[str, Any]:
    """The body with the names that all dialects have. Raises BadRequest."""
    if isinstance(body.think, str) and body.think not in THINK:
        raise fields.bad("think", f"a boolean or one of {', '.join(THINK)}", body.think)
    thinking = {} if body.think is None else {"thinking": body.think}
    return data | thinking | ({"model": named(body.model)} if body.model else {})


def _load(
    body: OllamaBody, data: Mapping[str, Any], inbound: Request, service: Service
) -> tuple[str, shapes.OllamaRestShape]:
    """Ollama's way to load a model ahead, and to unload it: ``keep_alive`` of 0. Returns its name."""
    name = service.models.served_name(model_of(data))
    if body.unloads:
        inbound.visitor.check_sees_all()  # everybody's waiting depends on it
        service.models.unload(name)
    else:
        service.models.load(name)
    return name, {"done": True, "done_reason": "unload" if body.unloads else "load"}


def _request(
    dialect: Dialect, body: OllamaBody, data: dict[str, Any], inbound: Request, settings: Settings, **own: Any
) -> ChatRequest:
    """`own`: fields that only one of the routes reads. Raises BadRequest, NotSupported."""
    given = data.get("options")
    fields.refuse_samplers(given if isinstance(given, dict) else {}, "options.")
    options = body.options or Options()
    most = options.num_predict
    alike = read_alike(dialect, options, data, inbound, settings) | {"stream": body.stream is not False}
    return ChatRequest(
        **alike | own,
        max_tokens=most if most is not None and most > 0 else None,
        stop=stop_of(options.stop, "options.stop"),
        response_format=_format(body.format),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _format(value: str | dict[str, Any] | None) -> ResponseFormat:
    if value is None or value == "":
        return ResponseFormat()
    if isinstance(value, dict):
        return ResponseFormat("json_schema", value, param="format")
    if value == "json":
        return ResponseFormat("json_object")
    raise fields.bad("format", "json or a JSON schema object", value)


# --- messages ---


def messages_of(messages: list[OllamaMessage]) -> tuple[Message, ...]:
    """The conversation, in its order. Calls have no ids in this API: a result belongs to the first open call of its
    name, or to the first open one."""
    result: list[Message] = []
    waiting: list[ToolCall] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        images = _images(message.images, f"{path}.images")
        if message.role in {"system", "user"}:
            role: Role = "user" if message.role == "user" else "system"
            result.append(Message(role, message.content or "", attachments=images))
        elif message.role == "assistant":
            items = fields.items_of(message.tool_calls or [], f"{path}.tool_calls")
            calls = tuple(_call(item, where, f"call_{index}_{number}") for number, (where, item) in enumerate(items))
            waiting = list(calls)
            text, thoughts = message.content or "", message.thinking or None
            result.append(Message("assistant", text, reasoning=thoughts, tool_calls=calls, attachments=images))
        elif message.role == "tool":
            result.append(_tool_result(message, images, waiting))
        else:
            raise fields.bad(f"{path}.role", ROLES, message.role)
    return tuple(result)


def _call(item: Any, path: str, default_id: str) -> ToolCall:
    ident = fields.optional_in(fields.object_of(item, path), "id", str, path)
    function = fields.object_of(item.get("function"), f"{path}.function")
    name = fields.string_in(function, "name", f"{path}.function")
    arguments = fields.optional_in(function, "arguments", dict, f"{path}.function") or {}
    return ToolCall(ident or default_id, name, json.dumps(arguments, ensure_ascii=False))


def _tool_result(message: OllamaMessage, images: tuple[Attachment, ...], waiting: list[ToolCall]) -> Message:
    call = _answered(message, waiting)
    ident = message.tool_call_id or (call.id if call else None)
    name = message.tool_name or (call.name if call else None)
    return Message("tool", message.content or "", tool_call_id=ident, name=name, attachments=images)


def _answered(message: OllamaMessage, waiting: list[ToolCall]) -> ToolCall | None:
    """The call that this result answers; it waits no longer."""
    by_id = (call for call in waiting if call.id == message.tool_call_id)
    by_name = (call for call in waiting if call.name == message.tool_name)
    found = next(by_id, None) or next(by_name, None) or next(iter(waiting), None)
    if found is not None:
        waiting.remove(found)
    return found


def _images(images: list[str] | None, path: str) -> tuple[Attachment, ...]:
    """Base64 texts. They stand before the message's text."""
    return tuple(Attachment(0, "data", data, path=f"{path}[{index}]") for index, data in enumerate(images or []))
