"""What the dialects share in validating bodies: pydantic bases, paths and values in errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from start_llm.api.common.documents import begin_request
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.jsontext import in_turn, parse_object
from start_llm.core.limits import LOOK_BACK, MESSAGES, MODEL, NAME, SESSION, TOOLS, WORDS, Limit
from start_llm.core.modelmap import plain_name

_PLAIN = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "too_short": "a list with at least one item",
}
_TYPES: dict[type, str] = {str: "a string", bool: "a boolean", dict: "an object"}
MOST_SHOWN = 80
"""Characters of a value in an error message."""
_BIG = 2**53
"""The largest whole number that every JSON library reads alike."""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which a field asks for nothing. Some clients send all the fields that they know."""

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


class Drawn(BodyModel):
    """How tokens are drawn, with OpenAI's names. `place`: of these fields in the body, for errors."""

    place: ClassVar[str] = ""
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
    repetition_guard: bool | None = None


class SamplingBody(Drawn):
    """The fields of every dialect but Ollama's: its model, whether it streams, and how tokens are drawn."""

    model: ModelName | None = None
    stream: bool | None = None


def parse_body[B: BodyModel](model: type[B], raw: bytes) -> tuple[B, dict[str, Any]]:
    """The validated body and the plain dictionary it came from. Raises BadRequest."""
    begin_request()
    with in_turn(raw):
        data = parse_object(raw)
        for name, kind, limit in _LENGTHS:
            if isinstance(data.get(name), kind):
                within(limit, len(data[name]), name)
        return validate(model, data), data


def refuse(data: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """Raises NotSupported for a field that would change the answer and cannot be followed here.

    Args:
        why: by field, what to do instead. A field that asks for nothing (`_NOTHING`) may stay.
    """
    for name, reason in why.items():
        if data.get(name) not in _NOTHING:
            raise NotSupported(f"{name}: {reason}", param=name)


SAMPLERS = {"dry_multiplier": 0, "mirostat": 0, "mirostat_mode": 0, "typical_p": 1, "xtc_probability": 0}
"""Other servers' ways of drawing tokens, with the value that turns each off."""


def refuse_samplers(data: Mapping[str, Any], path: str = "") -> None:
    """Raises NotSupported for a way of drawing that is not known here."""
    for name, off in SAMPLERS.items():
        if data.get(name) not in (*_NOTHING, off):
            reason = f"this way of drawing tokens is not supported; leave it out or set it to {off}."
            raise NotSupported(f"{path}{name}: {reason}", param=f"{path}{name}")


def validate[B: BodyModel](model: type[B], data: Any, prefix: str = "") -> B:
    """`prefix`: stands before the paths of fields in errors."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        path = prefix + field_path(problem["loc"])
        if problem["type"] == "missing":
            raise wrong(path, "this field is required.", "missing_field") from None
        if problem["type"] in _PLAIN:  # pydantic's own words name its classes, or what stands after its work
            raise bad(path, _PLAIN[problem["type"]], problem["input"]) from None
        raise wrong(path, f"{problem['msg']}, but got {short(problem['input'])}.") from None


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


def object_of(value: Any, path: str) -> dict[str, Any]:
    """Raises BadRequest where it is none."""
    if not isinstance(value, dict):
        raise bad(path, "an object", value)
    return value


def items_of(value: Any, path: str, expected: str = "a list") -> Iterator[tuple[str, Any]]:
    """The path and the value of each item. Raises BadRequest where it is no list."""
    if not isinstance(value, list):
        raise bad(path, expected, value)
    for index, item in enumerate(value):
        yield f"{path}[{index}]", item


def string_in(part: dict[str, Any], name: str, path: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", "a string", value)
    return value


def optional_in[T](part: dict[str, Any], name: str, kind: type[T], path: str, expected: str = "") -> T | None:
    """The field of this type, ``None`` where it is left out. Raises BadRequest where it has another."""
    value = part.get(name)
    if value is not None and not isinstance(value, kind):
        raise bad(f"{path}.{name}", expected or _TYPES[kind], value)
    return value


def name_in(part: dict[str, Any], path: str) -> str:
    """The name of a tool, or of a group of them."""
    name = part.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"{path}.name", "a string that is not empty", name)
    within(NAME, len(name), f"{path}.name")
    return name


def within(limit: Limit, count: int, path: str) -> None:
    """Raises BadRequest if `count` is over the limit."""
    if count > limit.most:
        allowed = f"at most {limit.most:,} {limit.what} are allowed"
        raise wrong(path, f"{allowed}, but there are {count:,}.", "limit_exceeded")


def bad(path: str, expected: str, value: Any) -> BadRequest:
    """The error of a field that has the wrong type or value."""
    return wrong(path, f"must be {expected}, but got {short(value)}.")


def wrong(path: str, why: str, code: str = "invalid_value") -> BadRequest:
    """The error of a field. `why`: the end of a sentence that begins with the field's path."""
    return BadRequest(f"{path}: {why}", param=path, code=code)
