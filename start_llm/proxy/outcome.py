"""What LiteLLM says of a request while it passes: in its hooks, and in its log.

Used of LiteLLM: the hooks of its `CustomLogger`, and the names of its loggers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

from start_llm.core.protocol import REFUSAL_HEADER

LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_TRACEBACK = "Traceback (most recent call last)"
_WORD = re.compile(r"[a-z_]{1,40}")


@dataclass(slots=True)
class RequestOutcome:
    """How LiteLLM's handling of one request ended."""

    of_fallback: bool = False  # it is FALLBACK_MODEL that is asked
    failed: bool = False  # it ended with an error
    reason: str | None = None  # the server's `REFUSAL_HEADER`
    error: dict[str, Any] | None = None  # the server's own error object; ``None`` where the error is LiteLLM's


current: ContextVar[RequestOutcome | None] = ContextVar("start_llm_outcome", default=None)
"""That of the request which the running task belongs to."""


class Hooks(CustomLogger):  # type: ignore[misc]  # LiteLLM is not typed
    """LiteLLM calls them while a request passes. Nobody may ask for FALLBACK_MODEL by the name of its entry."""

    def __init__(self, fallback_name: str | None) -> None:
        super().__init__()
        self._name = fallback_name

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Raises HTTPException for a client that asks for the entry itself: nothing goes there but what is counted."""
        outcome = current.get()
        if outcome is not None and outcome.of_fallback:
            return
        if self._name is not None and self._name in str(data.get("model")):
            raise HTTPException(404, f"{self._name!r} cannot be asked for: it gets what this server cannot answer.")

    async def async_filter_listed_models(self, user_api_key_dict: Any, model_names: Sequence[str]) -> Sequence[str]:
        return [name for name in model_names if name != self._name]

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        outcome = current.get()
        if outcome is not None:
            outcome.failed, outcome.reason = True, outcome.reason or _refusal(original_exception)
            outcome.error = outcome.error or _server_error(original_exception)


def _refusal(error: Any) -> str | None:
    """The server's word in the headers of its answer, which LiteLLM keeps in several places of its errors."""
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
    found = body.get("error") if isinstance(body, dict) else None
    return found if isinstance(found, dict) and isinstance(found.get("message"), str) else None


class OneLine(logging.Filter):
    """A request that fails is a line in LiteLLM's log, and no traceback: most often it is what the client sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        if current.get() is not None:
            record.exc_info = record.exc_text = None
            before, traceback, after = record.getMessage().partition(_TRACEBACK)
            if traceback:
                record.msg, record.args = f"{before.rstrip()} {after.rstrip().rpartition('\n')[2]}", None
        return True
