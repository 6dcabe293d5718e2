"""Texts to vectors, speech to text, text to speech: what the HTTP edge gets of encoders and audio models."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from start_llm.core.events import Progress

Text = str | tuple[int, ...]
"""A text, or the ids of its tokens without the model's own special tokens."""
AudioTask = Literal["transcription", "speech"]
SoundForm = Literal["mp3", "wav", "flac", "opus", "pcm"]
"""``pcm``: 16 bits, little-endian, 24,000 samples a second, as OpenAI's has."""


type Computation[Result] = Generator[Progress, None, Result]
"""Work on its way, a step of the model for each part; it returns the result.

The parts count tokens of texts to encode, seconds of a recording, or pieces of a text to speak.
The iteration raises BadRequest (it is no audio, or too long), OutOfMemory, Unavailable, NotSupported.
"""


@dataclass(frozen=True, slots=True)
class Encoded:
    vectors: Any  # (texts, dimensions), float32, each of length 1
    tokens: int  # of all texts together, special tokens included
    cut: int = 0  # texts that were too long, so that their vectors tell of their beginning only


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client knows of its recording."""

    language: str | None = None  # a code (``en``) or a name (``english``); ``None``: it is found out
    prompt: str = ""  # what was said before, or words that are going to be said; empty: nothing
    temperature: float = 0.0  # 0: none, and more of it by steps where the text repeats itself or is unsure


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A stretch of a transcript."""

    seek: int  # where the window began that it was heard in, in hundredths of a second
    start: float  # seconds
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float  # that it was decoded with
    avg_logprob: float  # mean log probability of its window's tokens; NaN: not known
    compression_ratio: float  # of its window's text, by zlib
    no_speech_prob: float  # that nobody speaks in its window; NaN: not known


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    language: str  # its code
    seconds: float  # of the recording
    segments: tuple[TranscriptSegment, ...]


@dataclass(frozen=True, slots=True)
class Sound:
    samples: Any  # float32 in -1 to 1, one channel
    rate: int  # samples a second
