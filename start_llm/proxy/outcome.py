"""What LiteLLM says of a request while it passes: in its hooks, and in its log.

Used of LiteLLM: the hooks of its `CustomLogger`, the names of its loggers, and how it writes the ids of responses.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import openai
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy.hooks.responses_id_security import ResponsesIDSecurity
from litellm.responses.utils import ResponsesAPIRequestUtils

from start_llm.core.protocol import REFUSAL_HEADER

LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_TRACEBACK = "Traceback (most recent call last)"
_CONNECTION_ERRORS = (httpx.TransportError, aiohttp.ClientError, openai.APIConnectionError)
_NEVER_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, aiohttp.ClientConnectorError)
_WORD = re.compile(r"[a-z_]{1,40}")


@dataclass(slots=True)
class RequestOutcome:
    """How LiteLLM's handling of one request ended."""

    failed: bool = False  # it ended with an error
    reason: str | None = None  # the server's `REFUSAL_HEADER`
    error: dict[str, Any] | None = None  # the server's own error object; ``None`` where the error is LiteLLM's
    status: int = 0  # of the error
    is_lost: bool = False  # the connection to the server could not be made, or broke
    is_unsent: bool = False  # it could not be made: the server has not seen the request
    node: str = ""  # the node that it is sent to; empty: nobody chose one
    # nodes that it was sent to. They do not get it again
    tried: set[str] = field(default_factory=set)
    breaks: int = 0  # times that the connection broke when it had been sent

    def forget_failure(self) -> None:
        """Before it is sent again."""
        self.failed = self.is_lost = self.is_unsent = False
        self.reason = None
        self.error = None
        self.status = 0


current: ContextVar[RequestOutcome | None] = ContextVar("start_llm_outcome", default=None)
"""That of the request which the running task belongs to."""


class Hooks(CustomLogger):  # type: ignore[misc]  # LiteLLM is not typed
    """LiteLLM calls them while a request passes."""

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        """LiteLLM gives a request up: its outcome gets why. Of several errors the first one's words count."""
        outcome = current.get()
        if outcome is not None:
            outcome.failed, outcome.reason = True, outcome.reason or _refusal(original_exception)
            outcome.error = outcome.error or _server_error(original_exception)
            outcome.status = outcome.status or _status(original_exception)
            outcome.is_lost = outcome.is_lost or _is_from(original_exception, _CONNECTION_ERRORS)
            outcome.is_unsent = _is_from(original_exception, _NEVER_CONNECTED)

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: Any,
        request_kwargs: Any = None,
        parent_otel_span: Any = None,
    ) -> list[Any]:
        """LiteLLM's entries of the node that `balancer` has chosen for this request."""
        outcome = current.get()
        if outcome is None or not outcome.node:
            return healthy_deployments
        return [entry for entry in healthy_deployments if entry.get("model_info", {}).get("node") == outcome.node]


def node_of_response(response_id: Any, nodes: Mapping[str, str]) -> str | None:
    """The node that has a stored response, by the id that LiteLLM gave it; ``None`` if the id does not say it. `nodes`:
    names of nodes by the ids of LiteLLM's entries."""
    if not isinstance(response_id, str):
        return None
    plain = ResponsesIDSecurity()._decrypt_response_id(response_id)[0]  # clients get ids that are encrypted
    return nodes.get(ResponsesAPIRequestUtils.get_model_id_from_response_id(plain) or "")


def _status(error: Exception) -> int:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else 0


def _is_from(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether an error of one of these kinds is behind `error`."""
    for _ in range(10):
        if error is None:
            return False
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refusal(error: Any) -> str | None:
    """The word that says why the server refused (`REFUSAL_HEADER`). LiteLLM's errors keep headers in several places."""
    places = (error, getattr(error, "response", None))
    found = [getattr(place, "headers", None) for place in places] + [getattr(error, "litellm_response_headers", None)]
    for name, value in (item for headers in found if isinstance(headers, Mapping) for item in headers.items()):
        if str(name).lower().removeprefix("llm_provider-") == REFUSAL_HEADER and _WORD.fullmatch(str(value)):
            return str(value)
    return None


def _server_error(error: Exception) -> dict[str, Any] | None:
    """The server's error object, which LiteLLM keeps as text behind words of its own."""
    text = str(getattr(error, "message", error))
    begin = text.find("{")
    try:
        body = json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else {}
    except (ValueError, RecursionError):
        return None
    return error_in(body)


def error_in(body: Any) -> dict[str, Any] | None:
    """The error object of a server's answer."""
    found = body.get("error") if isinstance(body, dict) else None
    return found if isinstance(found, dict) and isinstance(found.get("message"), str) else None


def in_one_line(record: logging.LogRecord) -> bool:
    """A log's filter. A request that fails is a line in LiteLLM's log, and no traceback: most often it is what the
    client sent."""
    if current.get() is not None:
        record.exc_info = record.exc_text = None
        before, traceback, after = record.getMessage().partition(_TRACEBACK)
        if traceback:
            record.msg, record.args = f"{before.rstrip()} {after.rstrip().rpartition('\n')[2]}", None
    return True
