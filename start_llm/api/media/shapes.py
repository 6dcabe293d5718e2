"""The shapes of vectors, rankings and transcripts. See `common.shapes`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ReadTokensShape(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingShape(TypedDict):
    """``embedding`` is base64 of little-endian float32 where the body asks for that."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsShape(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingShape]
    model: str
    usage: ReadTokensShape


class RankedTextShape(TypedDict):
    text: str


class RankedShape(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedTextShape]


class RerankShape(TypedDict):
    id: str
    object: Literal["list"]
    model: str
    results: list[RankedShape]
    usage: ReadTokensShape
    meta: dict[str, Any]


class HeardSegmentShape(TypedDict):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class HeardSecondsShape(TypedDict):
    type: Literal["duration"]
    seconds: int


class TranscriptShape(TypedDict):
    """All but ``text`` and ``usage`` only with ``response_format=verbose_json``."""

    text: str
    usage: HeardSecondsShape
    task: NotRequired[Literal["transcribe"]]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[HeardSegmentShape]]
