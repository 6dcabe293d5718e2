"""The shapes of transcripts. See `common.shapes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from start_llm.api.common.shapes import shape_of
from start_llm.core.media import TranscriptSegment

if TYPE_CHECKING:
    HeardSegmentShape = dict[str, Any]
else:
    HeardSegmentShape = shape_of("HeardSegmentShape", TranscriptSegment, id=int)


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
