"""Bodies by a client library's own types: each optional field, and each member of a union, at least once.

Of a ``TypedDict``: the least that it needs, and for each field each of its forms. A type inside is walked once for a
field of the body.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Required, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

DATA = "aGVsbG8="
_BY_NAME = {"data": DATA, "url": f"data:image/png;base64,{DATA}", "image_url": f"data:image/png;base64,{DATA}"}
_WORDS: dict[Any, Any] = {str: "x", int: 5, float: 0.5, bool: True, object: "x", Any: "x", type(None): None}


def bare(kind: Any) -> Any:
    """The type without what is written around it."""
    while get_origin(kind) in (typing.Annotated, Required, typing.NotRequired):
        kind = get_args(kind)[0]
    return kind


def least(kind: Any) -> Any:
    """The smallest value of a type."""
    return next(forms(kind, set()))


def _named(name: str, value: Any) -> Any:
    """Some words mean something by the field's name."""
    return _BY_NAME.get(name, value) if value == "x" else value


def bodies(kind: Any) -> Iterator[dict[str, Any]]:
    """The least body of a request, and one for each form of each field."""
    yield (start := least(kind))
    for name, (hint, _) in _fields(kind).items():
        for value in forms(hint, set()):
            yield start | {name: value}


def forms(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """The least value, and one for each form of each field inside."""
    kind = bare(kind)
    origin = get_origin(kind)
    if kind in _WORDS:
        yield _WORDS[kind]
    elif origin in (typing.IO, os.PathLike) or kind is os.PathLike:
        yield DATA  # what the library makes of a file
    elif origin is Literal:
        yield from get_args(kind)
    elif origin in (typing.Union, types.UnionType):
        for member in get_args(kind):
            yield from forms(member, seen)
    elif origin in (list, Iterable, Sequence, typing.Iterable):
        for value in forms(get_args(kind)[0], seen):
            yield [value]
    elif origin in (dict, Mapping):
        yield {}
    elif kind not in seen:
        seen.add(kind)
        start = {name: _named(name, least(hint)) for name, (hint, needed) in _fields(kind).items() if needed}
        yield start
        for name, (hint, _) in _fields(kind).items():
            for value in forms(hint, seen):
                yield start | {name: _named(name, value)}


def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it has to be there."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        # Where annotations are strings, `__required_keys__` does not know of ``Required``.
        return {n: (hint, n in kind.__required_keys__ or get_origin(hint) is Required) for n, hint in hints.items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: (field.annotation, field.is_required()) for name, field in kind.model_fields.items()}
    raise TypeError(f"no values are known of {kind!r}")
