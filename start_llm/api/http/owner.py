"""Who asks, as a digest: the API key that a request carries, and the user that its client names.

Says nothing about what is allowed: that is `access`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from start_llm.api.http.access import presented_keys
from start_llm.core.jsontext import parse_inner

USER_FIELDS = ("user", "safety_identifier")
_SESSION_END = re.compile(r"_session_[0-9a-fA-F-]+$")


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The API key that a request carries, checked or not; ``None`` where it carries none."""
    return next(iter(presented_keys(headers)), None)


def owner_of(data: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """`ChatRequest.owner`: SHA-256 in hex, 64 digits; ``None`` where the request has neither key nor user.

    Args:
        data: the body, of any dialect.
    """
    key, user = presented_key(headers), _user_of(data)
    return None if key is None and user is None else digest(key, user)


def digest(*parts: str | None) -> str:
    """SHA-256 in hex. A missing part and an empty one differ."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _user_of(data: Mapping[str, Any]) -> str | None:
    """OpenAI's ``user`` (or its newer name), else Anthropic's ``metadata.user_id``."""
    for name in USER_FIELDS:
        if isinstance(data.get(name), str) and data[name]:
            return str(data[name])
    metadata = data.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return _without_session(user) if isinstance(user, str) and user else None


def _without_session(user: str) -> str:
    """Claude Code puts its session into the user's id. A session that is resumed is still the same user's."""
    if not user.startswith("{"):
        return _SESSION_END.sub("", user)
    try:
        value = parse_inner(user)
    except ValueError:
        return user
    if not isinstance(value, dict):
        return user
    return json.dumps({name: value[name] for name in sorted(value) if name != "session_id"})
