"""Files to samples, against mlx-audio's own reader; and files that are none."""

from __future__ import annotations

import io

import numpy as np
import pytest

from start_llm.audio.samples import RATE, look_at, samples_of
from start_llm.core.errors import BadRequest
from tests.audio.tiny import encoded, tone, wav

pytestmark = pytest.mark.live


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("kind", ["wav", "FLAC"])
def test_samples_are_those_of_mlx_audio(kind: str, rate: int) -> None:
    from mlx_audio.audio_io import read

    data = wav(tone(1.5, rate=rate), rate, channels=2) if kind == "wav" else encoded(kind, rate)
    recording = look_at(data, "file")
    assert abs(recording.seconds - 1.5) < 0.1
    theirs, _ = read(io.BytesIO(data), dtype="float32", sample_rate=RATE, nchannels=1)
    ours = samples_of(recording, "file")
    assert ours.dtype == np.float32
    assert abs(len(ours) - len(theirs)) <= 1
    size = min(len(ours), len(theirs))
    assert np.abs(ours[:size] - theirs[:size]).max() < 1e-4


@pytest.mark.parametrize(("kind", "subtype"), [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_what_is_packed_with_loss_is_read_without_another_program(kind: str, subtype: str | None) -> None:
    heard = samples_of(look_at(encoded(kind, 16000, subtype), "file"), "file")
    first = tone(1.5)
    assert abs(len(heard) - len(first)) < 0.1 * RATE
    size = min(len(heard), len(first))
    assert np.corrcoef(heard[:size], first[:size])[0, 1] > 0.95


def test_a_file_that_is_shorter_than_its_header_says_is_read_to_its_end() -> None:
    heard = samples_of(look_at(wav(tone(2.0))[: 44 + RATE], "file"), "file")
    assert abs(len(heard) - RATE / 2) < 10


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"hello, this is text", "this is no WAV, FLAC, MP3 or Ogg"),
        (b"#EXTM3U\nfile:///etc/passwd", "this is no WAV"),
        (b"\x00\x00\x00\x20ftypM4A ", "this is no WAV"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "cannot be decoded"),
        (b"RIFF" + b"\xff" * 4 + b"WAVE" + b"\xff" * 400, "cannot be decoded"),
        (b"fLaC" + bytes(200), "cannot be decoded"),
        (b"OggS" + bytes(200), "cannot be decoded"),
        (b"ID3" + bytes(500), "file: "),
        (wav(tone(0.1))[:44], "no samples"),
        (wav(tone(0.1, rate=12345), 12345), "12345 samples a second; allowed are 8000, 11025"),
        (wav(np.zeros(0, np.float32)), "no samples"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        samples_of(look_at(data, "file"), "file")
    assert refused.value.param == "file"
