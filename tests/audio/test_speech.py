"""What a Soprano model speaks here, against `generate` of mlx-audio: the same weights, text and random numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from start_llm.audio import speech as speaking
from start_llm.audio.samples import SPOKEN_RATE, WRITTEN, encode, look_at, samples_of
from start_llm.audio.service import LONGEST, pieces_of
from start_llm.audio.speech import Speaker, load_steps
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.limits import Limit
from start_llm.core.media import Sound
from tests.audio.test_transcription import on_a_thread
from tests.audio.tiny import tone
from tests.steps import through

pytestmark = [pytest.mark.thorough, pytest.mark.live]

TEXT = "Hello there, this is a sentence."


@pytest.fixture(scope="module")
def speaker(voice_path: Path) -> Speaker:
    return on_a_thread(lambda: through(load_steps(voice_path, "tiny-voice"))[1])


def test_a_sentence_sounds_as_mlx_audio_says_it(speaker: Speaker) -> None:
    def work() -> tuple[list[float], Sound, Any]:
        mx.random.seed(3)
        seen, sound = through(speaker.speak([TEXT]))
        mx.random.seed(3)
        return seen, sound, np.array(next(iter(speaker._model.generate(TEXT))).audio)

    seen, sound, theirs = on_a_thread(work)
    assert seen == [1.0]
    assert sound.rate == 32000
    assert len(sound.samples) == len(theirs) > 1000
    assert np.abs(sound.samples - theirs).max() < 1e-5
    assert np.abs(sound.samples).max() > 0.01


def test_speech_without_an_end_is_refused(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "SPOKEN", Limit("seconds", 0))
    with pytest.raises(BadRequest, match="input: its speech is longer than 0 seconds"):
        on_a_thread(lambda: through(speaker.speak([TEXT])))


def test_every_sound_of_a_piece_is_a_step(speaker: Speaker) -> None:
    """Others work between them. A piece with line ends in it has several sounds."""
    seen, sound = on_a_thread(lambda: through(speaker.speak(["One.\nTwo.\nThree."])))
    assert seen == [1.0, 1.0, 1.0]
    assert len(sound.samples) > 1000


def test_a_checkpoint_that_lacks_weights_is_refused_in_a_sentence(voice_path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((voice_path / name).read_bytes())
    with pytest.raises(NotSupported, match="mlx-audio cannot load bare"):
        on_a_thread(lambda: through(load_steps(tmp_path, "bare")))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello.", ["Hello."]),
        (
            "A first sentence that is long.  A second\none that is, too!",
            ["A first sentence that is long.", "A second one that is, too!"],
        ),
        ("One. Two. Three. Four. Five. Six. Seven. Eight.", ["One. Two. Three. Four. Five. Six.", "Seven. Eight."]),
        ("ab", ["ab"]),
        ("One\\nand\\ttwo\\\\n\\three", ["One and two\\ hree"]),
        ("a\\n" * 8, ["a a a a a a a a"]),
    ],
)
def test_a_text_is_spoken_sentence_by_sentence(text: str, pieces: list[str]) -> None:
    assert pieces_of(text) == pieces


def test_no_piece_is_long_and_no_word_is_lost() -> None:
    words = [f"word{number}" for number in range(400)]
    for text in (" ".join(words), "x" * 2000, ". ".join(words)):
        pieces = pieces_of(text)
        assert max(map(len, pieces)) <= LONGEST
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("form", [*WRITTEN, "pcm"])
@pytest.mark.parametrize("samples", [0, 1, 100])
def test_hardly_any_speech_is_a_file_too(form: Any, samples: int) -> None:
    data = encode(Sound(np.zeros(samples, np.float32), 32000), form)
    assert len(data) > 100
    if form in {"wav", "flac", "mp3"}:
        assert look_at(data, "file").seconds >= 0.2


@pytest.mark.parametrize("form", [*WRITTEN, "pcm"])
@pytest.mark.parametrize("rate", [24000, 32000])
def test_every_form_of_sound_can_be_heard_again(form: Any, rate: int) -> None:
    data = encode(Sound(tone(1.0, rate=rate), rate), form)
    if form == "pcm":
        assert len(data) == 2 * SPOKEN_RATE
        heard = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        assert np.abs(heard - tone(1.0, rate=SPOKEN_RATE)).max() < 0.01
        return
    if form == "opus":
        import soundfile

        heard, found = soundfile.read(io.BytesIO(data))
        assert abs(len(heard) / found - 1.0) < 0.1
        return
    heard = samples_of(look_at(data, "file"), "file")
    assert abs(len(heard) / 16000 - 1.0) < 0.1
    assert np.abs(heard).max() > 0.1
