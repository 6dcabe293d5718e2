"""What the server and the proxy in front of it write alike: errors in each dialect, headers, names of a
conversation, seals. No I/O."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from http.client import responses
from typing import Any, Literal

from start_llm.core.errors import ContextLengthExceeded, MethodNotAllowed, StartLLMError
from start_llm.core.jsontext import inner_object

REFUSAL_HEADER = "x-start-llm-refusal"
"""The server's word for why it cannot answer a sound request, see `StartLLMError.refusal`."""
RETRY_HEADER = "x-should-retry"
"""Read by the SDKs of OpenAI and Anthropic, see `error_headers`."""
HEAD_HEADER = "x-start-llm-head"
WHEN_PLANNED = "when-planned"
"""With this value of `HEAD_HEADER` a stream's headers wait for the cache report however long that takes: what refuses
the request while it waits for its model or its turn is an error with a status then."""
SESSION_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id")
"""These name a conversation. `user`, `safety_identifier` and `prompt_cache_key` name people and groups: they do not."""
SESSION_HEADERS = (
    *("x-session-id", "x-claude-code-session-id", "x-openwebui-chat-id"),
    *("session_id", "session-id", "conversation_id"),
)
AGENT_HEADER = "x-claude-code-agent-id"
SESSION_END = re.compile(r"_session_([0-9a-fA-F-]+)$")
"""Claude Code's session at the end of ``metadata.user_id``, as its older versions write it."""
SIGNED = b"start_llm thinking "
"""What a signature of thinking is made from, in front of the text."""
SEAL = "start_llm.2."
"""How reasoning begins that this server sealed for its client to keep."""

ErrorStyle = Literal["openai", "anthropic", "ollama", "problem"]

ANTHROPIC_TYPES = {
    **dict.fromkeys((400, 405, 408, 415, 501), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[str, str]:
    """The client's own name of the conversation, and the field or header that has it (its longest part).

    Two empty texts without one.

    Sub-agents share their caller's name, and are conversations of their own: `AGENT_HEADER` is added to it.
    """
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    places = {"": body, "metadata.": metadata, "extra_body.": body.get("extra_body")}
    places["metadata.user_id."] = inner_session(user) if isinstance(user, str) else None
    named = [
        (str(place[name]), f"{path}{name}")
        for path, place in places.items()
        if isinstance(place, Mapping)
        for name in SESSION_FIELDS
        if isinstance(place.get(name), str | int) and not isinstance(place[name], bool) and place[name]
    ]
    named += [(headers[name], name) for name in SESSION_HEADERS if headers.get(name)]
    if not named:
        return "", ""
    session, where = named[0]
    agent = headers.get(AGENT_HEADER)
    if not agent:
        return session, where
    return f"{session}/{agent}", where if len(session) > len(agent) else AGENT_HEADER


def inner_session(user: str) -> dict[str, Any] | None:
    """What Claude Code puts into the user's id: a JSON object, or its session at the end."""
    old = SESSION_END.search(user)
    return {"session_id": old[1]} if old else inner_object(user)


def thinking_signature(thinking: str) -> str:
    """Opaque to clients, who must send it back with the block. It stands for the text and nothing else."""
    digest = hashlib.sha256(SIGNED + thinking.encode("utf-8", "replace")).digest()
    return base64.b64encode(digest).decode("ascii")


def style_of(path: str) -> ErrorStyle:
    """The error dialect of a path: Anthropic's, Ollama's, OpenAI's (and LM Studio's), RFC 7807 for what is our own."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/api/") and not path.startswith("/api/v0/"):
        return "ollama"
    if path.startswith(("/v1/", "/api/v0/")) and not path.startswith("/v1/cache"):
        return "openai"
    return "problem"


def openai_error(error: StartLLMError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error(error: StartLLMError) -> dict[str, Any]:
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # in the vendor's words: clients know by them that they must compact
        message = f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
        if error.prompt <= error.limit:
            message = (
                f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.asked} > {error.limit}, "
                "decrease input length or `max_tokens` and try again"
            )
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(error.status, "api_error"), "message": message}}


def ollama_error(error: StartLLMError) -> dict[str, Any]:
    return {"error": error.message}


def responses_code(kind: str, code: str | None) -> str:
    """The word of the Responses API for an error of this `StartLLMError.type` and code."""
    if code == "context_length_exceeded":
        return code
    words = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}
    return words.get(kind, "server_error")


def error_body(error: StartLLMError, style: ErrorStyle) -> tuple[dict[str, Any], str]:
    """JSON body and its content type; ``problem`` is RFC 7807."""
    if style != "problem":
        write = {"openai": openai_error, "anthropic": anthropic_error, "ollama": ollama_error}[style]
        return write(error), "application/json"
    body: dict[str, Any] = {"type": "about:blank", "title": status_phrase(error.status), "status": error.status}
    body["detail"] = error.message
    if error.param:
        body["param"] = error.param
    if error.code:
        body["code"] = error.code
    return body, "application/problem+json"


def error_headers(error: StartLLMError) -> dict[str, str]:
    """``Retry-After`` in whole seconds, where the error has one; and why a sound request is not answered here. Which
    methods a path takes, and that a key is a bearer token.

    A 501 would be sent again by the SDKs of OpenAI and Anthropic, as all that begins with 5: they are told not to.
    """
    headers = {}
    if error.status == HTTPStatus.NOT_IMPLEMENTED:
        headers[RETRY_HEADER] = "false"
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.refusal is not None:
        headers[REFUSAL_HEADER] = error.refusal
    return headers


def status_phrase(status: int) -> str:
    """The words behind a status."""
    return "Client Closed Request" if status == 499 else responses.get(status, "Error")
