"""Writes `start_llm/api/openapi.json`, the server's routes as an OpenAPI 3.1 document, and `docs.html`, the same for
people.

It is made of the table of routes, the models of bodies and the types that writers return. Every route is in it,
described here or not.

usage: python3.12 install_and_run.py run scripts/openapi_docs.py [--check]
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel, TypeAdapter  # noqa: E402
from pydantic.json_schema import models_json_schema  # noqa: E402

import start_llm  # noqa: E402
from scripts import openapi_parts as parts  # noqa: E402
from start_llm.api.anthropic.messages import MessagesBody  # noqa: E402
from start_llm.api.anthropic.shapes import CountedTokensShape, MessageEvent, MessageShape  # noqa: E402
from start_llm.api.common.request import WORDS  # noqa: E402
from start_llm.api.http.answers import ANTHROPIC_ID_HEADER, CACHE_HEADER, ID_HEADER  # noqa: E402
from start_llm.api.http.routes import Route  # noqa: E402
from start_llm.api.media.audio import AudioRoutes, SpeechBody, TranscriptionBody, TranscriptShape  # noqa: E402
from start_llm.api.media.embeddings import (  # noqa: E402
    CUT_HEADER,
    EmbeddingsBody,
    Encodings,
    OllamaEmbedBody,
)
from start_llm.api.ollama import shapes as ollama  # noqa: E402
from start_llm.api.ollama.chat import GenerateBody, OllamaChatBody  # noqa: E402
from start_llm.api.ollama.models import NOT_DONE, NameBody, PullBody, ShowBody  # noqa: E402
from start_llm.api.openai import shapes as openai  # noqa: E402
from start_llm.api.openai.chat import ChatBody, CompletionBody  # noqa: E402
from start_llm.api.openai.responses import ResponsesBody, StoredResponses  # noqa: E402
from start_llm.api.ops import status as ops  # noqa: E402
from start_llm.api.ops.page import Page  # noqa: E402
from start_llm.api.ops.status import Status  # noqa: E402
from start_llm.api.table import FILE, PAGE, Dialects, build_routes  # noqa: E402
from start_llm.core.errors import StartLLMError  # noqa: E402
from start_llm.core.protocol import (  # noqa: E402
    AGENT_HEADER,
    HEAD_HEADER,
    REFUSAL_HEADER,
    RETRY_HEADER,
    SESSION_FIELDS,
    SESSION_HEADERS,
    WHEN_PLANNED,
    ErrorStyle,
    status_phrase,
    style_of,
)

_SCHEMAS = "#/components/schemas/{model}"


_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Operation:
    """What the table does not say of a method of a route."""

    summary: str
    body: type[BaseModel] | None = None
    shape: Any = None  # of the answer, where it is JSON
    event: Any = None  # of each event or line, where the body asks for a stream
    media: tuple[str, ...] = ("application/json",)  # of the answer
    stream: str = _EVENTS
    is_request: bool = False  # is counted, has an id and a report
    headers: Mapping[str, str] = field(default_factory=dict)  # of this answer only: name to description
    also: int | None = None  # a second HTTP status whose answer has this shape


def _asks(summary: str, body: type[BaseModel], shape: Any, event: Any = None, **more: Any) -> Operation:
    return Operation(summary, body, shape, event, is_request=True, **more)


_COUNTED = "Counts the tokens of the prompt that this body would make; runs nothing"
_CUT = {CUT_HEADER: "How many texts were cut, if any were"}
_WHY = "What was reused and computed, and why"
OPERATIONS: dict[str, Operation] = {
    "GET /v1/models": Operation("Lists the models, loaded or not", shape=ops.ModelsShape),
    "GET /v1/models/{*}": Operation("One model, by any name that a request may use", shape=ops.ModelShape),
    "POST /v1/models/load": Operation("Loads a model; answers when it is loaded", shape=ops.ModelShape),
    "POST /v1/models/unload": Operation("Unloads a model; its KV goes to disk", shape=ops.ModelShape),
    "POST /v1/models/pin": Operation("Pins a model, or not any more", shape=ops.ModelShape),
    "POST /v1/chat/completions": _asks(
        "OpenAI chat completions", ChatBody, openai.ChatCompletionShape, openai.ChatChunkShape
    ),
    "POST /v1/completions": _asks(
        "Raw prompts", CompletionBody, openai.TextCompletionShape, openai.TextCompletionShape
    ),
    "POST /v1/messages": _asks("Anthropic messages", MessagesBody, MessageShape, MessageEvent),
    "POST /v1/messages/count_tokens": Operation(_COUNTED, MessagesBody, CountedTokensShape),
    "POST /v1/responses": _asks("OpenAI Responses", ResponsesBody, openai.ResponseShape, parts.ResponseEvent),
    "POST /v1/responses/input_tokens": Operation(_COUNTED, ResponsesBody, openai.InputTokensShape),
    "GET /v1/responses/{}": Operation("A stored response", shape=openai.ResponseShape),
    "DELETE /v1/responses/{}": Operation("Forgets a stored response", shape=openai.DeletedResponseShape),
    "GET /v1/responses/{}/input_items": Operation(
        "The input that led to a stored response", shape=openai.InputItemsShape
    ),
    "POST /v1/embeddings": _asks("Vectors of texts", EmbeddingsBody, parts.EmbeddingsShape, headers=_CUT),
    "POST /v1/audio/speech": _asks("A text as speech", SpeechBody, None, media=("audio/*",)),
    "POST /v1/audio/transcriptions": _asks(
        "What is said in a recording", TranscriptionBody, TranscriptShape, media=("application/json", "text/plain")
    ),
    "POST /v1/cache/explain": Operation(
        "What a body of any dialect would reuse and compute; runs nothing",
        shape=parts.ExplainedShape,
        headers={CACHE_HEADER: _WHY},
    ),
    "GET /v1/cache/requests": Operation("This key's last requests, newest first", shape=ops.RecentRequestsShape),
    "GET /v1/cache/requests/{}": Operation("The cache report of a request", shape=parts.RequestReportShape),
    "POST /api/chat": _asks(
        "Ollama's chat", OllamaChatBody, ollama.OllamaChatShape, ollama.OllamaChatShape, stream=_LINES
    ),
    "POST /api/generate": _asks(
        "Ollama's single prompts",
        GenerateBody,
        ollama.OllamaGenerateShape,
        ollama.OllamaGenerateShape,
        stream=_LINES,
    ),
    "POST /api/embed": _asks(
        "Vectors of texts, as Ollama sends them", OllamaEmbedBody, parts.OllamaVectorsShape, headers=_CUT
    ),
    "POST /api/show": Operation("One model, as Ollama tells it", ShowBody, ollama.OllamaShowShape),
    "POST /api/pull": Operation(
        "Fetches a model", PullBody, ollama.OllamaPulledShape, ollama.OllamaPulledShape, stream=_LINES
    ),
    "DELETE /api/delete": Operation("Removes a model that was fetched", NameBody, media=("text/plain",)),
    **{f"POST /api/{name}": Operation("Always 501: says what to do in its place", NameBody) for name in NOT_DONE},
    "GET /api/tags": Operation("The models, as Ollama lists them", shape=ollama.OllamaTagsShape),
    "GET /api/ps": Operation("The loaded models, as Ollama lists them", shape=ollama.OllamaPsShape),
    "GET /api/version": Operation(
        "The version of Ollama whose API this is, and this server's own", shape=ollama.OllamaVersionShape
    ),
    "GET /health": Operation("200 if the model answers, else 503", shape=parts.HealthShape, also=503),
    "GET /api/v0/models": Operation("The models, as LM Studio lists them", shape=ops.StudioModelsShape),
    "GET /api/v0/models/{*}": Operation("One model, as LM Studio tells it", shape=ops.StudioModelShape),
    "POST /api/v0/chat/completions": _asks(
        "OpenAI chat completions, where LM Studio has them", ChatBody, openai.ChatCompletionShape, openai.ChatChunkShape
    ),
    "GET /props": Operation("The main model, as llama.cpp tells it", shape=ops.PropsShape),
    "GET /slots": Operation("How many requests run, as llama.cpp tells it", shape=list[ops.SlotShape]),
    "GET /v1/loads": Operation("How busy the server is, in SGLang's fields", shape=ops.LoadsShape),
    "GET /metrics": Operation("Figures for Prometheus", media=("text/plain",)),
    "GET /openapi.json": Operation("This document", shape=dict[str, Any]),
    "GET /docs": Operation("This document, for people", media=("text/html",)),
    "GET /": Operation("A page for people", media=("text/html",)),
    "GET /page/feed": Operation("The feed that fills the page", media=(_EVENTS,)),
}
"""By method and pattern."""

OWN_FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"type": ["string", "integer", "null"]} for name in SESSION_FIELDS},
    "adapter": {"type": ["string", "null"], "description": "LoRA adapter that the model is asked with"},
    "enable_thinking": {"description": f"Whether it thinks first: {WORDS}"},
    "reasoning_effort": {"description": f"How much it thinks: {WORDS}"},
    "chat_template_kwargs": {"type": ["object", "null"], "description": "Variables of the chat template"},
    "extra_body": {"description": "The same fields, as some clients nest them"},
}
"""Fields of every body that asks the model, read beside those of its dialect."""
_ERRORS: dict[ErrorStyle, dict[str, Any]] = {
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
    "ollama": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "problem": {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "param": {"type": "string"},
            "code": {"type": "string"},
        },
    },
}
_TEXT = {"schema": {"type": "string"}}
_PAGES = "For the server's own page; it may change with it"
_ANSWER_HEADERS = {
    CACHE_HEADER: _WHY,
    ID_HEADER: "The request's id, for /v1/cache/requests/{id}",
    ANTHROPIC_ID_HEADER: "The same id",
}
_ERROR_HEADERS = {
    "Retry-After": {"description": "Seconds, where another try makes sense", "schema": {"type": "integer"}},
    REFUSAL_HEADER: {"description": "The word for why a sound request is not answered now", **_TEXT},
    RETRY_HEADER: {"description": "false: another try brings the same answer", **_TEXT},
}
_ASKED_HEADERS = {
    **dict.fromkeys(SESSION_HEADERS, "Names the conversation"),
    AGENT_HEADER: "Names a sub-agent of it",
    HEAD_HEADER: f"{WHEN_PLANNED}: a stream's head waits for the cache report",
}
_PLAIN = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}
"""What may be answered where no model is asked, beside 500 and 503."""


def error_statuses() -> dict[int, list[str]]:
    """The statuses of all errors that a client can see, and the codes that come with each."""
    found: dict[int, set[str]] = {}
    kinds = [StartLLMError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.type != "client_closed_request":
            found.setdefault(kind.status, set()).update([kind.code] if kind.code else [])
    return {status: sorted(codes) for status, codes in sorted(found.items())}


@cache
def routes() -> tuple[Route, ...]:
    """Of a server that answers nothing: only paths, methods and docstrings are looked at."""
    nothing: Any = None
    page: Any = object.__new__(Page)
    page.library = nothing
    stored: Any = object.__new__(StoredResponses)
    dialects, status = (
        Dialects(nothing, nothing, nothing, nothing),
        Status(nothing, nothing, nothing, nothing, nothing, 0),
    )
    return tuple(
        build_routes(dialects, stored, page, status, Encodings(nothing, nothing), AudioRoutes(nothing, nothing))
    )


def document() -> dict[str, Any]:
    models = {operation.body for operation in OPERATIONS.values() if operation.body is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema([(model, "validation") for model in ordered], ref_template=_SCHEMAS)
    schemas = found["$defs"]
    for name in ("ChatBody", "CompletionBody", "MessagesBody", "ResponsesBody", "OllamaChatBody", "GenerateBody"):
        schemas[name]["properties"] = OWN_FIELDS | schemas[name]["properties"]
    schemas |= {f"Error_{style}": schema for style, schema in _ERRORS.items()} | _answers()[1]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes():
        path, parameters = _path(route)
        inside = {method.lower(): _operation(route, method) for method in route.handlers}
        paths[path] = inside | ({"parameters": parameters} if parameters else {})
    key = {"bearer": {"type": "http", "scheme": "bearer"}}
    key |= {"key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    errors = {f"{style}_{status}": _error(style, status) for style in _ERRORS for status in error_statuses()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "start_llm",
            "version": start_llm.__version__,
            "description": "A local LLM server for coding agents. A turn costs what is new in it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "responses": errors, "securitySchemes": key},
    }


@cache
def _answers() -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """Schemas by the operation's name and ``shape`` or ``event``, and those that they refer to."""
    wanted: dict[tuple[str, str], Any] = {
        (name, kind): shape
        for name, operation in OPERATIONS.items()
        for kind, shape in (("shape", operation.shape), ("event", operation.event))
        if shape is not None
    }
    adapters = [(key, "serialization", TypeAdapter(shape)) for key, shape in wanted.items()]
    found, named = TypeAdapter.json_schemas(adapters, ref_template=_SCHEMAS)  # type: ignore[arg-type]
    return {key: found[key, "serialization"] for key in wanted}, named["$defs"]  # type: ignore[index]


def _operation(route: Route, method: str) -> dict[str, Any]:
    name = f"{method} {route.pattern}"
    told = (route.handlers[method].__doc__ or name).partition("\n")[0].rstrip(".")
    known = OPERATIONS.get(name, Operation(f"{told}. {_PAGES}"))
    answer = {"description": "The answer", "content": _content(name, known, style_of(route.pattern))}
    headers = {**(_ANSWER_HEADERS if known.is_request else {}), **known.headers}
    if headers:
        answer["headers"] = {header: {"description": what, **_TEXT} for header, what in headers.items()}
    found: dict[str, Any] = {
        "summary": known.summary + (" (for who may see everything)" if route.private else ""),
        "operationId": method.lower() + re.sub("[{}]", "", _path(route)[0]).replace("/", "_"),
        "tags": [_tag(route.pattern)],
        "responses": {"200": answer} | dict(_errors(route, method, asks=known.is_request)),
    }
    if known.also is not None:
        found["responses"][str(known.also)] = answer
    if known.body is not None:
        kind = "multipart/form-data" if route.form else "application/json"
        schema: dict[str, Any] = {"$ref": _SCHEMAS.format(model=known.body.__name__)}
        found["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    elif method == "POST":
        found["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    if known.is_request:
        found["parameters"] = [
            {"name": header, "in": "header", "description": what, **_TEXT} for header, what in _ASKED_HEADERS.items()
        ]
    return found


def _content(name: str, known: Operation, style: ErrorStyle) -> dict[str, Any]:
    """By media type. ``x-itemSchema`` is what an event of a stream holds: OpenAPI 3.2 has it without the ``x-``."""
    schemas, text = _answers()[0], {"type": "string"}
    content: dict[str, Any] = {
        media: {"schema": schemas.get((name, "shape"), {}) if "json" in media else text} for media in known.media
    }
    if (name, "event") in schemas:
        failed = {"$ref": _SCHEMAS.format(model=f"Error_{style}")}
        content[known.stream] = {"schema": text, "x-itemSchema": {"anyOf": [schemas[name, "event"], failed]}}
    return content


def _path(route: Route) -> tuple[str, list[dict[str, Any]]]:
    """``/v1/models/{id}``, and its parameter."""
    path = route.pattern.replace("{*}", "{id}").replace("{}", "{id}")
    given = {"name": "id", "in": "path", "required": True, **_TEXT}
    return path, [given] if "{id}" in path else []


def _tag(pattern: str) -> str:
    first, _, second = pattern.strip("/").partition("/")
    if pattern.startswith("/api/v0/"):
        return "lm studio"
    return second.partition("/")[0] if first == "v1" else "ollama" if first == "api" else "server"


def _errors(route: Route, method: str, *, asks: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for status in error_statuses():
        if asks or method == "POST" or status in {*_PLAIN, 500, 503}:
            yield str(status), {"$ref": f"#/components/responses/{style_of(route.pattern)}_{status}"}


def _error(style: ErrorStyle, status: int) -> dict[str, Any]:
    codes = error_statuses()[status]
    kind = "application/problem+json" if style == "problem" else "application/json"
    return {
        "description": status_phrase(status) + (f": {', '.join(codes)}" if codes else ""),
        "headers": _ERROR_HEADERS,
        "content": {kind: {"schema": {"$ref": _SCHEMAS.format(model=f"Error_{style}")}}},
    }


def text(value: Any, depth: int) -> str:
    """JSON with a line for each member of the first `depth` levels."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    inside = ",\n".join(f"{json.dumps(name)}:{text(inner, depth - 1)}" for name, inner in value.items())
    return "{\n" + inside + "\n}"


def page(whole: dict[str, Any]) -> str:
    """The document as a page without scripts and styles, which the strictest policy lets through."""
    return "\n".join(_lines(whole)) + "\n"


def _lines(whole: dict[str, Any]) -> Iterator[str]:
    title = f"{whole['info']['title']} {whole['info']['version']}"
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}: API</title><h1>{title}</h1>"
    yield "<p>The same for programs: <a href=/openapi.json>openapi.json</a>. <a href=#bodies>Bodies and answers</a>"
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            yield f"<h2 id={operation['operationId']}>{method.upper()} {html.escape(path)}</h2>"
            yield f"<p>{html.escape(operation['summary'])}"
            for media in operation.get("requestBody", {}).get("content", {}).values():
                if name := media["schema"].get("$ref", "").rpartition("/")[2]:
                    yield f"<p>Body: <a href=#{name}>{name}</a>"
            for media in operation["responses"]["200"]["content"].values():
                if name := media["schema"].get("$ref", "").rpartition("/")[2]:
                    yield f"<p>Answer: <a href=#{name}>{name}</a>"
            statuses = ", ".join(operation["responses"])
            yield f"<p>Answers: {', '.join(operation['responses']['200']['content'])}. Statuses: {statuses}."
    yield "<h1 id=bodies>Bodies and answers</h1>"
    for name, schema in whole["components"]["schemas"].items():
        yield f"<h2 id={name}>{name}</h2><ul>"
        for part, what in schema.get("properties", {}).items():
            needed = ", required" if part in schema.get("required", ()) else ""
            yield f"<li><b>{html.escape(part)}</b>{needed}: <code>{html.escape(json.dumps(what))}</code>"
        yield "</ul>"


def files() -> dict[Path, str]:
    """What is written, by path."""
    folder, whole = ROOT / "start_llm" / "api", document()
    return {folder / FILE: text(whole, 3) + "\n", folder / PAGE: page(whole)}


def main() -> int:
    old = {path: wanted for path, wanted in files().items() if not path.exists() or path.read_text("utf-8") != wanted}
    for path, wanted in old.items():
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} does not match the API: run scripts/openapi_docs.py")
        else:
            path.write_text(wanted, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(bool(old) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
