"""What a Whisper model hears here, against `generate` of mlx-audio itself: the same weights, the same recording."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.audio.transcription import FFT, HOP, WINDOW, Transcriber, load_steps
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.media import Hints, Transcript
from tests.audio.tiny import RATE, build_whisper, tone
from tests.steps import through
from tests.together import together

pytestmark = pytest.mark.thorough


def on_a_thread[T](work: Callable[[], T]) -> T:
    """MLX's streams belong to threads: nothing is computed on pytest's own."""
    return together([work])[0]


@pytest.fixture(scope="module")
def listener(whisper_path: Path) -> Transcriber:
    return on_a_thread(lambda: through(load_steps(whisper_path, "tiny-whisper"))[1])


def both(listener: Transcriber, samples: np.ndarray, hints: Hints, **more: Any) -> tuple[list[float], Transcript, Any]:
    """(seconds done at each step, ours, mlx-audio's)"""

    def work() -> tuple[list[float], Transcript, Any]:
        seen, found = through(listener.transcribe(samples, hints))
        return seen, found, listener._model.generate(samples, **more)

    return on_a_thread(work)


def told(transcript: Transcript) -> list[Any]:
    return [(s.seek, round(s.start, 2), round(s.end, 2), s.text, s.tokens) for s in transcript.segments]


def told_by_mlx_audio(output: Any) -> list[Any]:
    return [
        (s["seek"], round(s["start"], 2), round(s["end"], 2), s["text"], tuple(s["tokens"])) for s in output.segments
    ]


def test_a_recording_of_several_windows_says_what_mlx_audio_says(listener: Transcriber) -> None:
    samples = np.concatenate([tone(31, 220.0), tone(2, 900.0)])
    seen, ours, theirs = both(
        listener, samples, Hints(language="de", prompt="w7 w9"), language="de", initial_prompt="w7 w9"
    )
    assert ours.text == theirs.text
    assert len(ours.text.split()) > 10
    assert told(ours) == told_by_mlx_audio(theirs)
    assert (ours.language, ours.seconds) == ("de", 33.0)
    for mine, its in zip(ours.segments, theirs.segments, strict=True):
        assert abs(mine.avg_logprob - its["avg_logprob"]) < 1e-3
        assert abs(mine.no_speech_prob - its["no_speech_prob"]) < 1e-3
        assert mine.compression_ratio == its["compression_ratio"]
    assert len(seen) > 20  # a token a step
    assert seen == sorted(seen)


def test_the_language_is_found_out_and_a_short_sound_is_enough(listener: Transcriber) -> None:
    _, ours, theirs = both(listener, tone(0.3), Hints())
    assert (ours.language, ours.text) == (theirs.language, theirs.text)
    assert told(ours) == told_by_mlx_audio(theirs)


class Watched:
    """Samples that tell how many of them were looked at."""

    def __init__(self, samples: np.ndarray) -> None:
        self._samples, self.seen = samples, 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, part: slice) -> np.ndarray:
        found = self._samples[part]
        self.seen += len(found)
        return found


@pytest.mark.parametrize("count", [1, 150, 201, 16000, 30 * RATE + 7, 70 * RATE])
def test_a_step_reads_a_window_of_the_recording_and_no_more(listener: Transcriber, count: int) -> None:
    """Whoever decodes beside it waits for one step. What comes out is what mlx-audio makes of the whole."""
    samples = np.random.default_rng(count).normal(0, 0.2, count).astype(np.float32)
    whole = importlib.import_module("mlx_audio.stt.models.whisper.audio").log_mel_spectrogram

    def work() -> tuple[list[int], np.ndarray, np.ndarray]:
        watched, read = Watched(samples), []
        steps: Any = listener._spectrum(watched)  # type: ignore[arg-type]
        while True:
            before = watched.seen
            try:
                next(steps)
            except StopIteration as end:
                return read, end.value, np.array(whole(samples, 80, padding=WINDOW * HOP))
            read.append(watched.seen - before)

    read, ours, theirs = on_a_thread(work)
    assert max(read) <= WINDOW * HOP + FFT
    assert sum(read) >= count
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4


def test_what_it_hears_changes_what_it_says(listener: Transcriber) -> None:
    low, high = (
        on_a_thread(lambda samples=samples: through(listener.transcribe(samples, Hints("de")))[1])  # type: ignore[misc]
        for samples in (tone(2, 150.0), np.random.default_rng(3).normal(0, 0.3, 2 * RATE).astype(np.float32))
    )
    assert low.text != high.text


def test_languages_are_codes_or_names_that_it_knows(listener: Transcriber) -> None:
    assert [listener.check(each) for each in (None, "de", "German", "castilian")] == [None, "de", "de", "es"]
    with pytest.raises(BadRequest, match="language='klingon': tiny-whisper knows en, zh"):
        listener.check("klingon")


def test_a_checkpoint_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = build_whisper(tmp_path / "bare", tokenizer=False)
    with pytest.raises(NotSupported, match="mlx-audio cannot load bare"):
        on_a_thread(lambda: through(load_steps(folder, "bare")))
