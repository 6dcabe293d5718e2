"""The entry of FALLBACK_MODEL in LiteLLM's configuration, and what is said of it at the start.

What goes there and when decides `fallback`, in LiteLLM's process.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from start_llm.core.settings import Settings

PREFIX = "fallback:"
"""In front of FALLBACK_MODEL in the entry's name: it must not be a name that also means a model of this machine."""
RETRIES = 2
COOLDOWN_SECONDS = 60.0
ANSWER_SECONDS = 600.0
_FAILURES = 2  # in a minute; with the next one LiteLLM leaves the provider alone for COOLDOWN_SECONDS
_KINDS = ("InternalServerError", "RateLimitError", "TimeoutError", "ServiceUnavailableError", "BadGatewayError")
_PROVIDERS = "provider_endpoints_support_backup.json"  # LiteLLM's own table


def entry_name(settings: Settings) -> str:
    return f"{PREFIX}{settings.fallback_model}"


def retry_policy(settings: Settings) -> dict[str, Any]:
    """For LiteLLM's router. Who is told to come back later is not waited for: LiteLLM would, up to a minute a time."""
    return {entry_name(settings): {"RateLimitErrorRetries": 0}}


def fallback_entry(settings: Settings, ping_seconds: float) -> dict[str, Any]:
    """LiteLLM's entry. Without FALLBACK_API_KEY and FALLBACK_API_BASE it looks for the provider's own variables."""
    parameters: dict[str, Any] = {
        "model": settings.fallback_model,
        "num_retries": RETRIES,
        "timeout": ANSWER_SECONDS,
        "stream_timeout": ANSWER_SECONDS,
        "drop_params": True,
        "keepalive_seconds": ping_seconds,
        # Should it lead back to this proxy, by whatever way, it ends there.
        "extra_headers": {"x-start-llm-fallback": "off"},
    }
    own = {"api_key": settings.fallback_api_key, "api_base": settings.fallback_api_base}
    parameters |= {name: value for name, value in own.items() if value}
    allowed = {f"{kind}AllowedFails": _FAILURES for kind in _KINDS} | {"AuthenticationErrorAllowedFails": 0}
    info = {"id": entry_name(settings), "cooldown_time": COOLDOWN_SECONDS, "allowed_fails_policy": allowed}
    return {"model_name": entry_name(settings), "litellm_params": parameters, "model_info": info}


def usable(settings: Settings, environment: Mapping[str, str], say: Callable[[str], None]) -> Settings:
    """Says at the start what FALLBACK_MODEL is going to do. Returns the settings, without it where it cannot work."""
    if not settings.fallback_model:
        return settings
    wrong = _problem(settings)
    say(f"fallback  off: {wrong}" if wrong else f"fallback  {_announced(settings, environment)}")
    return settings.model_copy(update={"fallback_model": None}) if wrong else settings


def _problem(settings: Settings) -> str:
    """Why nothing can be sent to FALLBACK_MODEL, in a sentence; empty where nothing is known against it."""
    if settings.proxy == "off":
        return "FALLBACK_MODEL works through the proxy only, and PROXY=off."
    provider = (settings.fallback_model or "").partition("/")[0]
    known = providers()
    if not known or provider in known:
        return ""
    near = difflib.get_close_matches(provider, known, 1)
    meant = f"; the nearest one is {near[0]!r}" if near else ""
    return f"FALLBACK_MODEL={settings.fallback_model!r}: LiteLLM knows no provider {provider!r}{meant}."


def providers() -> list[str]:
    """Those that LiteLLM knows, read without importing it, which takes seconds; empty where they cannot be found."""
    found = importlib.util.find_spec("litellm")
    try:
        table = Path(found.origin).with_name(_PROVIDERS) if found and found.origin else Path()
        return list(json.loads(table.read_text(encoding="utf-8"))["providers"])
    except (OSError, ValueError, KeyError):
        return []


def _announced(settings: Settings, environment: Mapping[str, str]) -> str:
    model = settings.fallback_model or ""
    where = f" at {settings.fallback_api_base}" if settings.fallback_api_base else ""
    told = (
        f"ON: a conversation that this server cannot answer (model not loadable, no memory, queue full, context too "
        f"long) is sent, whole, to {model}{where}"
    )
    variable = f"{model.partition('/')[0].upper()}_API_KEY"
    if settings.fallback_api_key or settings.fallback_api_base or variable in environment:
        return told
    return f"{told}. {variable} is not set, and neither is FALLBACK_API_KEY: it may be refused there"
