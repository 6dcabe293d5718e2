"""Every way in which clients ask for thinking, or for none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.api.common.fields import bad, within
from start_llm.core.limits import VARIABLES

OFF = frozenset({"off", "none", "disabled", "disable", "false", "no", "0"})
ON = frozenset({"on", "enabled", "enable", "true", "yes", "auto", "adaptive", "default", "1"})
EFFORTS = frozenset({"minimal", "low", "medium", "high", "xhigh", "max"})
FIELDS = ("enable_thinking", "thinking", "reasoning_effort", "reasoning")
WORDS = "a boolean or one of enabled, adaptive, disabled, on, off, minimal, low, medium, high, xhigh, max"


@dataclass(frozen=True, slots=True)
class Thinking:
    """What was asked; ``None`` where nothing was said. `budget` is in tokens."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


def thinking_of(data: Mapping[str, Any]) -> Thinking:
    """Reads all fields at all depths; the first that says something wins, field by field.

    Raises:
        BadRequest: a field at the top has a value that means nothing. What is nested in
            ``metadata`` may be the client's own, so there it is passed over.
    """
    enabled, effort, budget = None, None, None
    for place, path, strict in _places(data):
        for name in FIELDS:
            if place.get(name) is None:
                continue
            found = _read(place[name], f"{path}{name}", strict)
            enabled = found.enabled if enabled is None else enabled
            effort = found.effort if effort is None else effort
            budget = found.budget if budget is None else budget
    return Thinking(enabled, effort, budget)


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


def _read(value: Any, path: str, strict: bool) -> Thinking:
    if isinstance(value, bool):
        return Thinking(value)
    if isinstance(value, str):
        return _word(value, path, strict)
    if isinstance(value, dict):
        return _object(value, path, strict)
    if strict:
        raise bad(path, WORDS, value)
    return Thinking()


def _word(value: str, path: str, strict: bool) -> Thinking:
    word = value.strip().lower()
    if word in OFF:
        return Thinking(False)
    if word in EFFORTS:
        return Thinking(True, word)
    if word in ON:
        return Thinking(True)
    if strict:
        raise bad(path, WORDS, value)
    return Thinking()


def _object(value: dict[str, Any], path: str, strict: bool) -> Thinking:
    enabled, effort = None, None
    for name in ("enabled", "type", "effort", "level"):
        if value.get(name) is None:
            continue
        found = _read(value[name], f"{path}.{name}", strict)
        enabled = found.enabled if enabled is None else enabled
        effort = found.effort if effort is None else effort
    budget = None
    for name in ("budget_tokens", "max_tokens"):
        number = value.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            if strict:
                raise bad(f"{path}.{name}", "a whole number of tokens", number)
            continue
        budget = number
    if enabled is None and budget is not None:
        enabled = budget > 0
    return Thinking(enabled, effort, budget)
