"""Texts to vectors, speech to text, text to speech: what the HTTP edge gets of encoders and audio models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from start_llm.core.events import Progress

Text = str | tuple[int, ...]
"""A text, or the ids of its tokens without the model's own special tokens."""
AudioTask = Literal["transcription", "speech"]
SoundForm = Literal["mp3", "wav", "flac", "opus", "pcm"]
"""``pcm``: 16 bits, little-endian, 24,000 samples a second, as OpenAI's has."""


class Computation[Result](Protocol):
    """Work on its way, a step of the model for each part. `result` is there when the parts are over.

    The parts count tokens of texts to encode, seconds of a recording, or pieces of a text to speak.
    The iteration raises BadRequest (it is no audio, or too long), OutOfMemory, Unavailable, NotSupported.
    """

    result: Result

    def __iter__(self) -> Iterator[Progress]: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """
    Attributes:
        vectors: (texts, dimensions), float32, each of length 1.
        tokens: of all texts together, special tokens included.
        cut: texts that were too long, so that their vectors tell of their beginning only.
    """

    vectors: Any
    tokens: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client knows of its recording.

    Attributes:
        language: a code (``en``) or a name (``english``); ``None``: it is found out.
        prompt: what was said before, or words that are going to be said; empty: nothing.
        temperature: 0: none, and more of it by steps where the text repeats itself or is unsure.
    """

    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A stretch of a transcript.

    Attributes:
        seek: where the window began that it was heard in, in hundredths of a second.
        start, end: seconds.
        temperature: that it was decoded with.
        avg_logprob: mean log probability of its window's tokens; NaN: not known.
        compression_ratio: of its window's text, by zlib.
        no_speech_prob: that nobody speaks in its window; NaN: not known.
    """

    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """`language`: its code; `seconds`: of the recording."""

    text: str
    language: str
    seconds: float
    segments: tuple[TranscriptSegment, ...]


@dataclass(frozen=True, slots=True)
class Sound:
    """`samples`: float32 in -1 to 1, one channel; `rate` of them a second."""

    samples: Any
    rate: int
