"""What the dialects share in reading bodies: pydantic bases, paths in errors, sampling, session ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from start_llm.core.errors import BadRequest
from start_llm.core.request import Sampling
from start_llm.core.settings import Settings

SESSION_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key")
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "conversation_id",
    "x-session-affinity",
)
_PLAIN = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "too_short": "a list with at least one item",
}
AGENT_HEADER = "x-claude-code-agent-id"


class Body(BaseModel):
    """Types are strict, unknown fields are ignored, ``null`` is the same as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class SamplingBody(Body):
    """The sampling fields of every dialect, with OpenAI's names."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    repetition_context_size: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None


def parse_body[B: Body](model: type[B], raw: bytes) -> tuple[B, dict[str, Any]]:
    """The validated body and the plain dictionary it came from. Raises BadRequest."""
    data = parse_json(raw)
    if not isinstance(data, dict):
        raise BadRequest(f"The body must be a JSON object, not {_kind(data)}.")
    return validate(model, data), data


def parse_json(raw: bytes) -> Any:
    if not raw.strip():
        raise BadRequest("The request has no body; a JSON object is needed.")
    try:
        value = json.loads(raw)
        # Clients that cut strings by UTF-16 units send half an emoji; no tokenizer takes that.
        return _mend_surrogates(value) if b"\\ud" in raw or b"\\uD" in raw else value
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _mend_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mend_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_mend_surrogates(key): _mend_surrogates(item) for key, item in value.items()}
    return value


def validate[B: Body](model: type[B], data: Any) -> B:
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
    """A value as it may stand in an error message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def bad(path: str, expected: str, value: Any) -> BadRequest:
    """The error of a field that has the wrong type or value."""
    return BadRequest(f"{path}: must be {expected}, but got {short(value)}.", param=path, code="invalid_value")


def sampling_of(body: SamplingBody, settings: Settings) -> Sampling:
    """The body's values, the settings' where it says nothing."""

    def pick(value: Any, default: Any) -> Any:
        return default if value is None else value

    temperature = pick(body.temperature, settings.default_temperature)
    top_p = pick(body.top_p, settings.default_top_p)
    if top_p == 0:  # nothing but the likeliest token is left
        temperature, top_p = 0.0, 1.0
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
    )


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit():
            raise bad(f"logit_bias.{key}", "named by a token id", key)
        pairs.append((int(key), float(value)))
    return tuple(sorted(pairs))


def stop_of(stop: Any, path: str = "stop") -> tuple[str, ...]:
    """One stop string, a list of them, or ``None``."""
    if stop is None:
        return ()
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or len(words) > 64:
        raise bad(path, "a string or a list of at most 64 strings", stop)
    for index, word in enumerate(words):
        if not isinstance(word, str) or not word:
            raise bad(f"{path}[{index}]" if words is stop else path, "a string that is not empty", word)
    return tuple(words)


def session_of(data: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The client's own id of the conversation, wherever it puts one."""
    places = [data, data.get("metadata"), data.get("extra_body"), _json_object(_nested(data, "metadata", "user_id"))]
    for place in places:
        if isinstance(place, dict):
            for name in SESSION_FIELDS:
                if isinstance(place.get(name), str | int) and place[name]:
                    return _with_agent(str(place[name]), headers)
    for name in SESSION_HEADERS:
        if headers.get(name):
            return _with_agent(headers[name], headers)
    user = data.get("user")
    return user if isinstance(user, str) and user else None


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
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), type(value).__name__)
