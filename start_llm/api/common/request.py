"""What all dialects read alike: sampling, stop strings, names, and every way in which clients ask for thinking."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from start_llm.api.common.fields import MOST_SHOWN, Drawn, bad, refuse_samplers, within
from start_llm.api.http.access import RequestOwners, owner_of
from start_llm.api.http.routes import Request
from start_llm.core.limits import ADAPTER, BIAS, SESSION, STOP, STOPS, STOPS_TOGETHER, VARIABLES
from start_llm.core.messages import Message
from start_llm.core.modelmap import ADAPTER_SIGN, plain_name
from start_llm.core.protocol import session_of
from start_llm.core.request import ChatRequest, Dialect, Sampling
from start_llm.core.settings import Settings
from start_llm.prompt.clients import UNKNOWN, Clients

OFF = frozenset({"off", "none", "disabled", "disable", "false", "no", "0"})
ON = frozenset({"on", "enabled", "enable", "true", "yes", "auto", "adaptive", "default", "1"})
EFFORTS = frozenset({"minimal", "low", "medium", "high", "xhigh", "max"})
FIELDS = ("enable_thinking", "thinking", "reasoning_effort", "reasoning")
WORDS = "a boolean or one of enabled, adaptive, disabled, on, off, minimal, low, medium, high, xhigh, max"
PREFIXES: Mapping[Dialect, str] = {
    "chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_", "ollama": "ollama-",
    "embeddings": "embd-", "transcription": "transcription-", "speech": "speech-",
}  # fmt: skip
"""Of the ids of answers."""


def read_alike(
    dialect: Dialect, drawn: Drawn, data: dict[str, Any], inbound: Request, settings: Settings
) -> dict[str, Any]:
    """The fields of a `ChatRequest` that all dialects read alike. Raises BadRequest."""
    refuse_samplers(data)
    session, where = session_of(data, inbound.headers)
    within(SESSION, len(session), where)
    return {
        "id": f"{PREFIXES[dialect]}{uuid.uuid4().hex}",
        "dialect": dialect,
        "model": model_of(data),
        "sampling": sampling_of(drawn, settings),
        "stream": bool(data.get("stream")),
        "session": session or None,
        "owner": owner_of(data, inbound.headers),
        "received": inbound.received,
    } | ({} if dialect == "completions" else {"template_kwargs": template_kwargs_of(data), **thinking_of(data)})


def counted_request(
    dialect: Dialect, model: str, data: dict[str, Any], inbound: Request, owners: RequestOwners
) -> ChatRequest:
    """A request of another kind, as observers see it; who made it is remembered."""
    owner = owner_of(data, inbound.headers)
    request = ChatRequest(
        f"{PREFIXES[dialect]}{uuid.uuid4().hex}", dialect, model, owner=owner, received=inbound.received
    )
    owners.remember(request.id, inbound.visitor, owner)
    return request


# --- which agent a request seems to come from: for people who look at figures; nothing is decided by it ---

_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,39}")
_BUILT_IN = Clients()


def agent_of(messages: Sequence[Message], headers: Mapping[str, str]) -> str:
    """By its system text, else the product that its ``User-Agent`` names first; ``other`` if neither says anything."""
    known = _BUILT_IN.of(messages)
    if known is not UNKNOWN:
        return known.name.replace("_", " ")
    agent = headers.get("User-Agent", "").strip()
    if agent.startswith("Mozilla/"):
        return "browser"
    product = _PRODUCT.match(agent.partition("/")[0])
    return product[0].strip() if product else "other"


# --- sampling and stop strings ---

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LOOK_BACK = 256
"""Tokens that the repetition penalty looks back."""


def sampling_of(body: Drawn, settings: Settings) -> Sampling:
    """The body's values, the settings' where it says nothing."""

    def pick(value: Any, default: Any) -> Any:
        return default if value is None else value

    values = {name: pick(getattr(body, name), getattr(settings, f"default_{name}")) for name in _DRAWN}
    values["repetition_context_size"] = pick(body.repetition_context_size, _LOOK_BACK)
    left_open = frozenset(name for name in _DRAWN if getattr(body, name) is None)
    if values["top_p"] == 0:  # nothing but the likeliest token is left
        values |= {"temperature": 0.0, "top_p": 1.0}
        left_open -= {"temperature"}
    return Sampling(
        **values | {"top_k": max(0, values["top_k"])},
        presence_penalty=pick(body.presence_penalty, 0.0),
        frequency_penalty=pick(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias, f"{body.place}logit_bias"),
        seed=body.seed,
        drafts=pick(body.drafts, True),
        repetition_guard=pick(body.repetition_guard, settings.repetition_guard),
        left_open=left_open,
    )


def _logit_bias(bias: dict[str, Any] | None, path: str) -> tuple[tuple[int, float], ...]:
    within(BIAS, len(bias or {}), path)
    pairs = []
    for key, value in (bias or {}).items():
        where = f"{path}.{key[:MOST_SHOWN]}"
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise bad(where, "named by a token id", key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad(where, "a number from -100 to 100", value)
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


# --- names ---


def model_of(data: Mapping[str, Any]) -> str:
    """The model that a body names, and its `adapter`, as ``model+adapter``; may be empty. Raises BadRequest."""
    model, adapter, extra = data.get("model"), data.get("adapter"), data.get("extra_body")
    if adapter is None and isinstance(extra, dict):
        adapter = extra.get("adapter")
    named = plain_name(model) if isinstance(model, str) else ""
    if adapter is None:
        return named
    if not isinstance(adapter, str) or not adapter:
        raise bad("adapter", "the name of an adapter", adapter)
    within(ADAPTER, len(adapter), "adapter")
    return f"{named}{ADAPTER_SIGN}{adapter}"


# --- thinking ---


def thinking_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of thinking, in the fields of a `ChatRequest`.

    Reads all fields at all depths; the first that says something wins, field by field. Raises BadRequest for a value
    that means nothing; not in ``metadata``, where it may be the client's own.
    """
    said: dict[str, Any] = {}
    for place, path, strict in _places(data):
        for name, value in _said(FIELDS, place, path, strict):
            said.setdefault(name, value)
    return said


def template_kwargs_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the chat template, without the thinking switch that `thinking_of` reads."""
    kwargs: dict[str, Any] = {}
    for place in (data.get("extra_body"), data):
        if isinstance(place, dict) and place.get("chat_template_kwargs") is not None:
            given = place["chat_template_kwargs"]
            if not isinstance(given, dict):
                raise bad("chat_template_kwargs", "an object", given)
            within(VARIABLES, len(given), "chat_template_kwargs")
            kwargs.update(given)
    kwargs.pop("enable_thinking", None)
    return kwargs


def _places(data: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, bool]]:
    yield data, "", True
    for name in ("chat_template_kwargs", "extra_body", "metadata"):
        inner = data.get(name)
        if isinstance(inner, dict):
            strict = name != "metadata"
            yield inner, f"{name}.", strict
            nested = inner.get("chat_template_kwargs")
            if isinstance(nested, dict):
                yield nested, f"{name}.chat_template_kwargs.", strict


def _said(names: tuple[str, ...], place: Mapping[str, Any], path: str, strict: bool) -> Iterator[tuple[str, Any]]:
    """Fields of a `ChatRequest` with what these names say of them, the surest first."""
    for name in names:
        value, where = place.get(name), f"{path}{name}"
        word = value.strip().lower() if isinstance(value, str) else None
        if isinstance(value, dict):
            yield from _said_by_object(value, where, strict)
        elif isinstance(value, bool):
            yield "thinking", value
        elif word in OFF or word in ON:
            yield "thinking", word in ON
        elif word in EFFORTS:
            yield from (("thinking", True), ("reasoning_effort", word))
        elif value is not None and strict:
            raise bad(where, WORDS, value)


def _said_by_object(value: dict[str, Any], path: str, strict: bool) -> Iterator[tuple[str, Any]]:
    """A budget alone says that it is to think, if it is one."""
    yield from _said(("enabled", "type", "effort", "level"), value, f"{path}.", strict)
    for name in ("max_tokens", "budget_tokens"):
        number = value.get(name)
        if type(number) is int and number >= 0:
            yield from (("thinking_budget", number), ("thinking", number > 0))
        elif number is not None and strict:
            raise bad(f"{path}.{name}", "a whole number of tokens", number)
