"""What stands in a body before LiteLLM sees it: JSON of an object, and none of LiteLLM's own parameters.

LiteLLM takes parameters of its own from the same object as the vendor's: where to send the request and with which key,
which file of certificates to open, whom to tell about it. They are for programs that trust their caller. A client of
this proxy gets 400 for them. It does not know which names those are: `application` reads them from LiteLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from start_llm.core.errors import BadRequest, StartLLMError
from start_llm.core.jsontext import inner_object, parse_object
from start_llm.core.modelmap import MOST_NAME
from start_llm.core.protocol import session_of
from start_llm.proxy.asgi import JSON, asked_for, error_answer, off_the_loop, read_body, replay, with_body
from start_llm.proxy.own_fields import EXTRA, fold

_NAMED = ("chat/completions", "responses")
ALLOWED = frozenset({"metadata", "disable_fallbacks", "litellm_session_id", "litellm_trace_id"})
"""A client's own data, names of its conversation, and a word that asks for less."""
_NESTED = ("metadata", EXTRA)
_PREFIXES = ("litellm_", "_litellm", "langfuse_", "langsmith_", "user_api_key", "mock_", "aws_", "vertex_", "azure_")


@dataclass(frozen=True)
class LiteLLMNames:
    """Names that mean something to LiteLLM itself."""

    parameters: frozenset[str]  # its own parameters, which no client may set
    nested: frozenset[str]  # those that it also takes from inside `metadata`
    # of its functions that get a body's fields as keywords. A field of that name would be given twice. The server
    # ignores fields that it does not know, so these can go.
    arguments: frozenset[str]

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises BadRequest that names the first field which LiteLLM would take as an order to itself."""
        for name, value in body.items():
            if self._is_parameter(name, self.parameters):
                raise _refused(name)
            if name in _NESTED and isinstance(value, dict):
                known = self.parameters if name == EXTRA else self.nested
                for inner in value:
                    if self._is_parameter(inner, known):
                        raise _refused(f"{name}.{inner}")

    def _is_parameter(self, name: str, known: frozenset[str]) -> bool:
        return name not in ALLOWED and (name in known or name.startswith(_PREFIXES))


def _refused(path: str) -> BadRequest:
    message = f"{path}: this is a parameter of the proxy's own, which requests cannot set."
    return BadRequest(message, param=path, code="proxy_parameter")


def _named(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """`body` with the conversation's full name, sub-agent included: LiteLLM does not pass such headers on.

    Of messages it passes on ``metadata.user_id`` only. Where Claude Code puts its session there, the name goes, too.
    """
    name = session_of(body, headers)[0]
    if path in _NAMED:
        return body if name == session_of(body, {})[0] else body | {"session_id": name}
    metadata = body.get("metadata") or {}
    if path != "messages" or not isinstance(metadata, dict):
        return body
    user = metadata.get("user_id")
    if name == session_of({"metadata": {"user_id": user}}, {})[0]:
        return body
    inner = inner_object(user) if isinstance(user, str) else None
    if user and inner is None:  # a text of another form names a person: it stays as it is
        return body
    return body | {"metadata": metadata | {"user_id": json.dumps((inner or {}) | {"session_id": name})}}


class RequestBodies:
    """ASGI middleware within `access`. What it passes on has its whole body, of `most_bytes`, in one message.

    `names`: the server's names of models, by those that it does not know (PROXY_MODEL_ID).
    """

    def __init__(self, app: ASGIApp, *, litellm_names: LiteLLMNames, names: Mapping[str, str], most_bytes: int) -> None:
        self._app = app
        self._litellm_names = litellm_names
        self._names = names
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a POST on with its whole body, JSON checked (no form of audio), or answers what is wrong."""
        path = asked_for(scope)
        if not path:
            await self._app(scope, receive, send)
            return
        is_json = not path.endswith("audio/transcriptions")
        try:
            raw = await read_body(receive, self._most_bytes)
            if raw is None:
                return
            if is_json:
                raw = await off_the_loop(len(raw), self._checked, path, raw, Headers(scope=scope))
        except StartLLMError as error:
            await error_answer(scope["path"], error)(scope, receive, send)
            return
        # Without `-H` curl says that it sends a form, and LiteLLM believes it.
        await self._app(with_body(scope, raw, JSON if is_json else None), replay(raw, receive), send)

    def _checked(self, path: str, raw: bytes, headers: Mapping[str, str]) -> bytes:
        """`raw` as LiteLLM gets it. Raises BadRequest, TooLarge."""
        body = parse_object(raw)
        if not isinstance(body.get("model"), str | None):  # LiteLLM looks it up before it looks at it
            raise BadRequest("model: this must be a string, the name of a model.", param="model", code="invalid_value")
        if len(body.get("model") or "") > MOST_NAME:  # LiteLLM goes through it again and again, on the event loop
            raise BadRequest(f"model: a name has at most {MOST_NAME} characters.", param="model", code="invalid_value")
        self._litellm_names.check(body)
        changed = {name: value for name, value in body.items() if name not in self._litellm_names.arguments}
        if not path.startswith(("audio/", "embeddings")):
            changed = fold(path, _named(path, changed, headers), self._names)
        halves = b"\\ud" in raw or b"\\uD" in raw  # the parser has replaced them, LiteLLM refuses them
        return raw if changed == body and not halves else json.dumps(changed).encode()
