"""What the dialects share in reading bodies: pydantic bases, paths in errors, sampling, session ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from start_llm.core.errors import BadRequest
from start_llm.core.jsontext import parse_inner, parse_object
from start_llm.core.limits import (
    ADAPTER,
    BIAS,
    LOOK_BACK,
    MESSAGES,
    MODEL,
    SESSION,
    STOP,
    STOPS,
    STOPS_TOGETHER,
    TOOLS,
    WORDS,
    Limit,
)
from start_llm.core.modelmap import ADAPTER_SIGN, plain_name
from start_llm.core.request import Sampling
from start_llm.core.settings import Settings

SESSION_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id")
"""These name a conversation. `user`, `safety_identifier` and `prompt_cache_key` name people and groups: they do not."""
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "conversation_id",
)
_PLAIN = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "too_short": "a list with at least one item",
}
AGENT_HEADER = "x-claude-code-agent-id"
MOST_SHOWN = 80
"""Characters of a value in an error message."""
_BIG = 2**53
"""The largest whole number that every JSON library reads alike."""

ModelName = Annotated[str, AfterValidator(plain_name)]
Tokens = Annotated[int, Field(ge=1, le=_BIG)]

_LENGTHS: tuple[tuple[str, type, Limit], ...] = (
    ("messages", list, MESSAGES),
    ("input", list, MESSAGES),
    ("tools", list, TOOLS),
    ("functions", list, TOOLS),
    ("include", list, WORDS),
    ("modalities", list, WORDS),
    ("model", str, MODEL),
    ("user", str, SESSION),
    ("previous_response_id", str, SESSION),
)
"""What is counted before a body is validated, where it has the type that is meant."""


class BodyModel(BaseModel):
    """Types are strict, unknown fields are ignored, ``null`` is the same as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class SamplingBody(BodyModel):
    """The sampling fields of every dialect, with OpenAI's names."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_BIG)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    repetition_context_size: Annotated[int, Field(ge=0, le=LOOK_BACK.most)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    drafts: bool | None = None


def parse_body[B: BodyModel](model: type[B], raw: bytes) -> tuple[B, dict[str, Any]]:
    """The validated body and the plain dictionary it came from. Raises BadRequest."""
    data = parse_object(raw)
    for name, kind, limit in _LENGTHS:
        if isinstance(data.get(name), kind):
            within(limit, len(data[name]), name)
    return validate(model, data), data


def validate[B: BodyModel](model: type[B], data: Any) -> B:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        path = field_path(problem["loc"])
        if problem["type"] == "missing":
            raise BadRequest(f"{path}: this field is required.", param=path, code="missing_field") from None
        if problem["type"] in _PLAIN:  # pydantic's own words name its classes, or what stands after its work
            raise bad(path, _PLAIN[problem["type"]], problem["input"]) from None
        message = f"{path}: {problem['msg']}, but got {short(problem['input'])}."
        raise BadRequest(message, param=path, code="invalid_value") from None


def field_path(loc: Iterable[int | str]) -> str:
    """``messages[2].content`` of ``("messages", 2, "content")``; names of union members are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and (part.isidentifier() or path == "") and part not in {"str", "int", "float", "bool"}:
            path += f".{part}" if path else part
    return path


def short(value: Any) -> str:
    """A value as it may stand in an error message; only its beginning is looked at."""
    try:
        text = json.dumps(_beginning(value, depth=3), ensure_ascii=False)
    except (TypeError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _beginning(value: Any, depth: int) -> Any:
    """As much of `value` as `short` may show."""
    if isinstance(value, str):
        return value[: MOST_SHOWN + 1]
    if isinstance(value, list | dict) and depth == 0:
        return "..."
    if isinstance(value, list):
        return [_beginning(item, depth - 1) for item in value[: MOST_SHOWN // 2]]
    if isinstance(value, dict):
        pairs = islice(value.items(), MOST_SHOWN // 2)
        return {str(key)[: MOST_SHOWN + 1]: _beginning(item, depth - 1) for key, item in pairs}
    return value


def word(value: Any) -> str | None:
    """A value where a word is expected: ``None`` if it is anything but text, so that it can be looked up in a table."""
    return value if isinstance(value, str) else None


def within(limit: Limit, count: int, path: str) -> None:
    """Raises BadRequest if `count` is over the limit."""
    if count > limit.most:
        raise BadRequest(
            f"{path}: at most {limit.most:,} {limit.what} are allowed, but there are {count:,}.",
            param=path,
            code="limit_exceeded",
        )


def bad(path: str, expected: str, value: Any) -> BadRequest:
    """The error of a field that has the wrong type or value."""
    return BadRequest(f"{path}: must be {expected}, but got {short(value)}.", param=path, code="invalid_value")


_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_of(body: SamplingBody, settings: Settings) -> Sampling:
    """The body's values, the settings' where it says nothing."""

    def pick(value: Any, default: Any) -> Any:
        return default if value is None else value

    temperature = pick(body.temperature, settings.default_temperature)
    top_p = pick(body.top_p, settings.default_top_p)
    left_open = frozenset(name for name in _DRAWN if getattr(body, name) is None)
    if top_p == 0:  # nothing but the likeliest token is left
        temperature, top_p = 0.0, 1.0
        left_open -= {"temperature"}
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, pick(body.top_k, settings.default_top_k)),
        min_p=pick(body.min_p, settings.default_min_p),
        repetition_penalty=pick(body.repetition_penalty, settings.default_repetition_penalty),
        repetition_context_size=pick(body.repetition_context_size, settings.default_repetition_context_size),
        presence_penalty=pick(body.presence_penalty, 0.0),
        frequency_penalty=pick(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        drafts=pick(body.drafts, True),
        left_open=left_open,
    )


def _logit_bias(bias: dict[str, Any] | None) -> tuple[tuple[int, float], ...]:
    within(BIAS, len(bias or {}), "logit_bias")
    pairs = []
    for key, value in (bias or {}).items():
        path = f"logit_bias.{key[:MOST_SHOWN]}"
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise bad(path, "named by a token id", key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad(path, "a number from -100 to 100", value)
        pairs.append((int(key), float(value)))
    return tuple(sorted(pairs))


def stop_of(stop: Any, path: str = "stop") -> tuple[str, ...]:
    """One stop string, a list of them, or ``None``."""
    if stop is None:
        return ()
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list):
        raise bad(path, f"a string or a list of at most {STOPS.most} strings", stop)
    within(STOPS, len(words), path)
    together = 0
    for index, text in enumerate(words):
        where = f"{path}[{index}]" if words is stop else path
        if not isinstance(text, str) or not text:
            raise bad(where, "a string that is not empty", text)
        within(STOP, len(text), where)
        together += len(text)
    within(STOPS_TOGETHER, together, path)
    return tuple(words)


def model_of(data: Mapping[str, Any]) -> str:
    """The model that a body names, and its `adapter`, as ``model+adapter``; empty: whatever is served.

    Which names there are is known elsewhere. Raises BadRequest if the adapter is no text.
    """
    model, adapter = data.get("model"), data.get("adapter")
    if adapter is None:
        adapter = _nested(data, "extra_body", "adapter")
    named = plain_name(model) if isinstance(model, str) else ""
    if adapter is None:
        return named
    if not isinstance(adapter, str) or not adapter:
        raise bad("adapter", "the name of an adapter", adapter)
    within(ADAPTER, len(adapter), "adapter")
    return f"{named}{ADAPTER_SIGN}{adapter}"


def session_of(data: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The client's own id of the conversation, wherever it puts one. Raises BadRequest if it is too long."""
    found = _session(data, headers)
    within(SESSION, len(found or ""), "session_id")
    return found


def _session(data: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    places = [data, data.get("metadata"), data.get("extra_body"), _json_object(_nested(data, "metadata", "user_id"))]
    for place in places:
        if isinstance(place, dict):
            for name in SESSION_FIELDS:
                if isinstance(place.get(name), str | int) and place[name]:
                    return _with_agent(str(place[name]), headers)
    for name in SESSION_HEADERS:
        if headers.get(name):
            return _with_agent(headers[name], headers)
    return None


def _with_agent(session: str, headers: Mapping[str, str]) -> str:
    """Sub-agents share their parent's session id; they are conversations of their own."""
    agent = headers.get(AGENT_HEADER)
    return f"{session}/{agent}" if agent else session


def _nested(data: Mapping[str, Any], *names: str) -> Any:
    value: Any = data
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _json_object(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, str) or not text.startswith("{"):
        return None
    try:
        value = parse_inner(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
