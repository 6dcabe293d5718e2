"""Speech to text and back: what the HTTP edge may ask of audio models. `audio` implements it; tests fake it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from start_llm.core.encoding import EncodingProgress

AudioTask = Literal["transcription", "speech"]
SoundForm = Literal["mp3", "wav", "flac", "opus", "pcm"]
"""``pcm``: 16 bits, little-endian, 24,000 samples a second, as OpenAI's has."""


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
    """
    Attributes:
        language: its code.
        seconds: of the recording.
    """

    text: str
    language: str
    seconds: float
    segments: tuple[TranscriptSegment, ...]


@dataclass(frozen=True, slots=True)
class Sound:
    """
    Attributes:
        samples: float32 in -1 to 1, one channel.
        rate: samples a second.
    """

    samples: Any
    rate: int


class Hearing(Protocol):
    """A recording on its way; the parts count seconds of it. `result` is there when they are over.

    The iteration raises BadRequest (it is no audio, or too long), OutOfMemory, Unavailable, NotSupported.
    """

    result: Transcript

    def __iter__(self) -> Iterator[EncodingProgress]: ...


class Speaking(Protocol):
    """A text on its way; the parts count pieces of it. `result`, a file, is there when they are over.

    The iteration raises BadRequest, OutOfMemory, Unavailable, NotSupported.
    """

    result: bytes

    def __iter__(self) -> Iterator[EncodingProgress]: ...


class Audio(Protocol):
    """Thread-safe; called on HTTP threads."""

    def named(self, asked: str, task: AudioTask) -> str:
        """The name of the model that `asked` means for this task. Raises BadRequest, NotFound, NotSupported."""
        ...

    def transcribe(self, model: str, file: bytes, hints: Hints) -> Hearing:
        """`model`: as `named` says. The iteration computes."""
        ...

    def speak(self, model: str, text: str, form: SoundForm) -> Speaking:
        """`model`: as `named` says; `text` is not blank. The iteration computes."""
        ...
