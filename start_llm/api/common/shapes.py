"""What answers hold in every dialect, for `/openapi.json`.

Shapes are what pydantic makes the schemas of answers of; nothing is validated by them while answering. A test holds
fuzzed answers against them: fields that stand in a shape must be there, others may not.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TokenLogprobShape(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprobShape(TokenLogprobShape):
    top_logprobs: list[TokenLogprobShape]


class MissShape(TypedDict):
    """Why more was computed than was new."""

    reason: str
    token: int
    expected: str
    found: str
    message: int | None
    field: str | None
    rule: str | None
    detail: str
    remedy: str


class CacheReportShape(TypedDict):
    """What a request reused and computed, and why: tokens, or bytes and seconds where the name says so."""

    prompt: int
    reused: int
    computed: int
    new: int
    joined: int
    computed_idle: int
    copied_bytes: int
    generated: int
    forwards: int
    drafted: int
    accepted: int
    copied: int
    headed: int
    forced: int
    seconds_queued: float
    seconds_prefill: float
    session: str
    cut: NotRequired[str]
    repeated: NotRequired[int]
    miss: NotRequired[MissShape]
