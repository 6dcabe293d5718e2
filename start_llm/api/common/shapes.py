"""What answers hold in every dialect. What a dialect's answers hold stands beside it.

A shape is the type of what a writer returns, and `/openapi.json` is made of it. mypy holds the writers to it, and a
test holds fuzzed answers to it. What is written from a dataclass has the shape of its fields.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, get_type_hints

from start_llm.core.report import CacheReport, Miss


class TokenLogprobShape(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprobShape(TokenLogprobShape):
    top_logprobs: list[TokenLogprobShape]


def shape_of(name: str, written: type, optional: Collection[str] = (), **more: Any) -> Any:
    """The shape of a dataclass that is written as JSON. `more`: new fields, others, or None for none."""
    fields = get_type_hints(written) | more
    whole = {field: NotRequired[kind] if field in optional else kind for field, kind in fields.items() if kind}
    return TypedDict(name, whole)  # type: ignore[misc, operator]


REPORT: dict[str, Any] = {"miss": shape_of("MissShape", Miss, stored=None)}
"""How a report is written (`CacheReport.as_dict`)."""
UNTOLD = ("cut", "repeated", "miss")
if TYPE_CHECKING:
    CacheReportShape = dict[str, Any]
else:
    CacheReportShape = shape_of("CacheReportShape", CacheReport, UNTOLD, **REPORT)
