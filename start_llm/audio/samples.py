"""Recordings to samples and back. Any thread: no MLX array is touched.

libsndfile decodes, in a child process (`decoder`); mlx-audio resamples. Only formats that hold their own sound: other
decoders (ffmpeg) read playlists, and with them other files.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from start_llm.audio.decoder import Decoder, NotDecoded
from start_llm.core.errors import BadRequest
from start_llm.core.media import Sound, SoundForm

LIBRARY = "mlx_audio"
RATE = 16000  # samples a second, as the models that listen want them
SPOKEN_RATE = 24000
LEAST_SECONDS = 0.2  # of a file of speech: silence is added
WRITTEN = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
}
"""Formats of speech, and libsndfile's names for them."""
FORMATS = "WAV, FLAC, MP3 or Ogg (Vorbis, Opus)"
RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000, 176400, 192000)
"""Others would need a filter of millions of taps."""
DECODER = Decoder()  # one for the process, since its child is


@dataclass(frozen=True, slots=True)
class Recording:
    """A file, its samples a second, and how many of them each channel has."""

    data: bytes
    rate: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def look_at(data: bytes, param: str) -> Recording:
    """Reads the header, and of an MP3 that of each frame. Raises BadRequest: this is no recording."""
    if not data:
        raise _refused(param, "the file is empty.")
    if not _is_recording(data):
        raise _refused(param, f"this is no {FORMATS} file (it begins with {data[:8]!r}).")
    try:
        rate, frames = DECODER.look(data)
    except NotDecoded as error:
        raise _broken(param, error) from None
    if rate not in RATES:
        raise _refused(param, f"{rate} samples a second; allowed are {', '.join(map(str, RATES))}.")
    if frames < 1:
        raise _refused(param, "the recording has no samples.")
    return Recording(data, rate, frames)


def samples_of(recording: Recording, param: str) -> np.ndarray:
    """All channels mixed, `RATE` a second: float32 in -1 to 1. Raises BadRequest: it cannot be decoded."""
    resample: Any = importlib.import_module(f"{LIBRARY}.resample")
    count = 0

    def pieces() -> Iterator[np.ndarray]:
        nonlocal count
        for piece in DECODER.decode(recording.data):
            samples = np.frombuffer(piece, np.float32)
            count += len(samples)
            yield samples

    decoded = pieces()
    try:
        samples = resample.resample_audio_chunks(decoded, recording.rate, RATE, recording.frames)
        for _ in decoded:  # the end, if it was not asked for: left unread, it would cost the child
            pass
    except (NotDecoded, ValueError) as error:
        raise _broken(param, error) from None
    kept = samples[: -(-count * RATE // recording.rate)]  # a file may be shorter than its header says
    if not len(kept):
        raise _broken(param, "nothing could be decoded")
    return np.ascontiguousarray(kept, np.float32)


def encode(sound: Sound, form: SoundForm) -> bytes:
    """The file. Any thread."""
    samples, rate = sound.samples, sound.rate
    if len(samples) < LEAST_SECONDS * rate:  # of less some encoders make no file at all
        samples = np.concatenate([samples, np.zeros(int(LEAST_SECONDS * rate) - len(samples), np.float32)])
    if form in {"pcm", "opus"} and rate != SPOKEN_RATE:
        resample: Any = importlib.import_module(f"{LIBRARY}.resample")
        samples, rate = np.clip(resample.resample_audio_array(samples, rate, SPOKEN_RATE), -1.0, 1.0), SPOKEN_RATE
    if form == "pcm":
        return bytes((samples * 32767.0).astype("<i2").tobytes())
    soundfile: Any = importlib.import_module("soundfile")
    file, (kind, subtype) = io.BytesIO(), WRITTEN[form]
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def _is_recording(data: bytes) -> bool:
    mp3 = data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] and data[1] & 0xE0 == 0xE0 and data[1] & 0x06)
    return data[:4] in (b"fLaC", b"OggS") or (data[:4] == b"RIFF" and data[8:12] == b"WAVE") or bool(mp3)


def _refused(param: str, why: str) -> BadRequest:
    return BadRequest(f"{param}: {why}", param=param, code="invalid_value")


def _broken(param: str, why: object) -> BadRequest:
    return _refused(param, f"the file cannot be decoded as audio ({why}).")
