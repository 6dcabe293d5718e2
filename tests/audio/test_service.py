"""How a recording becomes text, around a scripted model: what waits, what is refused before work begins."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from start_llm.audio.service import AudioService
from start_llm.core.errors import BadRequest, NotFound, NotSupported, Unavailable
from start_llm.core.limits import RECORDED
from start_llm.core.media import Hints, Transcript
from start_llm.core.settings import Settings
from tests.audio.tiny import RATE, tone, wav
from tests.steps import through

pytestmark = pytest.mark.live

Service = Callable[..., AudioService]


class FakeListener:
    def __init__(self) -> None:
        self.closed = False
        self.steps = 0

    def check(self, language: str | None) -> str | None:
        return language

    def transcribe(self, samples: np.ndarray, hints: Hints) -> Generator[float, None, Transcript]:
        try:
            for _ in range(3):
                self.steps += 1
                yield 0.0
        except GeneratorExit:
            self.closed = True
            raise
        return Transcript(f"{len(samples)} samples", hints.language or "en", len(samples) / RATE, ())


class FakePool:
    """A pool, its only lease, and the model thread."""

    def __init__(self) -> None:
        self.handle = FakeListener()
        self.loaded = True
        self.open = 0
        self.chores = 0

    def audio_name(self, asked: str, task: str) -> str:
        if asked != "known":
            raise NotFound(f"{asked} is not known", param="model")
        return asked

    def open_audio(self, name: str, task: str) -> FakePool:
        self.open += 1
        return self

    def wait(self, seconds: float) -> bool:
        return self.loaded

    def close(self) -> None:
        self.open -= 1

    def chore(self, steps: Generator[float, None, Any]) -> Any:
        self.chores += 1
        return through(steps)[1]


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def service(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr("start_llm.audio.service.STEP_SECONDS", 0.0)
    monkeypatch.setattr("start_llm.audio.service.LOOK_SECONDS", 0.01)

    def made(**settings: Any) -> AudioService:
        return AudioService(Settings(_env_file=None, **settings), pool, pool)  # type: ignore[call-arg]

    return made


def test_a_recording_goes_through_in_steps(service: Service, pool: FakePool) -> None:
    audio = service()
    parts, found = through(audio.transcribe("known", wav(tone(0.5)), Hints("de")))
    assert len(parts) == 3
    assert found == Transcript("8000 samples", "de", 0.5, ())
    assert (pool.open, pool.chores) == (0, 4)
    assert audio.figures() == {"transcribed_seconds": 0.5, "spoken_seconds": 0.0}


@pytest.mark.parametrize("by_itself", [True, False])
def test_who_goes_or_loses_the_model_thread_gives_all_back(service: Service, pool: FakePool, by_itself: bool) -> None:
    audio = service()
    parts: Any = iter(audio.transcribe("known", wav(tone(0.5)), Hints()))
    next(parts)
    assert pool.open == 1
    if by_itself:
        parts.close()
        assert pool.handle.closed
    else:
        pool.chore = Mock(side_effect=Unavailable("The server is shutting down."))  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            next(parts)
    assert pool.open == 0
    assert audio._memory.take(RECORDED.most, 0.0)


def test_signs_of_life_while_the_model_is_loaded(service: Service, pool: FakePool) -> None:
    pool.loaded = False
    parts = iter(service().transcribe("known", wav(tone(0.5)), Hints()))
    assert [(part.done, part.total) for part in (next(parts), next(parts))] == [(0, 0), (0, 0)]
    pool.loaded = True
    assert len(list(parts)) == 3


def test_recordings_wait_for_each_other_where_they_are_long(service: Service, pool: FakePool) -> None:
    audio = service()
    assert audio._memory.take(RECORDED.most - 0.25, 0.0)
    parts = iter(audio.transcribe("known", wav(tone(0.5)), Hints()))
    assert next(parts).total == 0
    assert pool.handle.steps == 0
    audio._memory.give_back(RECORDED.most - 0.25)
    assert len(list(parts)) == 3


def test_who_waits_too_long_for_room_in_memory_gives_its_model_back(
    service: Service, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.audio.service.WAIT_SECONDS", 0.0)
    audio = service()
    assert audio._memory.take(RECORDED.most - 0.25, 0.0)
    parts = iter(audio.transcribe("known", wav(tone(0.5)), Hints()))
    with pytest.raises(Unavailable, match="no room beside them"):
        for _ in range(100):  # of 0.01 s each
            assert next(parts) is not None
    assert (pool.open, pool.handle.steps) == (0, 0)
    assert audio._memory.take(0.25, 0.0), "nothing was taken"


def test_who_waits_too_long_for_its_model_is_told_so(
    service: Service, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("start_llm.audio.service.WAIT_SECONDS", 0.0)
    pool.loaded = False
    parts = iter(service().transcribe("known", wav(tone(0.5)), Hints()))
    with pytest.raises(Unavailable, match="The model 'known' is still being loaded"):
        for _ in range(100_000):
            assert next(parts) is not None
    assert pool.open == 0


def test_a_recording_that_is_too_long_is_refused_before_it_is_decoded(
    service: Service, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("start_llm.audio.service.samples_of")
    sound = bytearray(wav(np.zeros(8 * RATE, np.float32), 8000))  # 16 s
    monkeypatch.setattr("start_llm.audio.service.RECORDED", RECORDED.__class__("seconds", 15))
    with pytest.raises(BadRequest, match="a recording of 16 seconds; at most 15 are allowed"):
        list(service().transcribe("known", bytes(sound), Hints()))
    struct.pack_into("<I", sound, 40, 2**31)  # what the header says is not there
    with pytest.raises(BadRequest, match="file: "):
        list(service().transcribe("known", bytes(sound), Hints()))
    assert pool.open == 0


def test_what_the_settings_name_in_vain_is_told_with_its_reason(service: Service) -> None:
    audio = service(transcription_model="/nowhere/at-all")
    audio.prepare(lambda step, part: None)
    assert "TRANSCRIPTION_MODEL=/nowhere/at-all" in audio.problems[0]
    with pytest.raises(NotFound, match="TRANSCRIPTION_MODEL"):
        audio.named("", "transcription")
    assert audio.named("known", "transcription") == "known"


def test_a_model_of_another_architecture_is_refused(service: Service, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "parakeet"}')
    audio = service(transcription_model=str(tmp_path))
    audio.prepare(lambda step, part: None)
    assert "its architecture is 'parakeet'; for this there is whisper" in audio.problems[0]


def test_not_installed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.core.extras.is_installed", lambda library: False)
    audio = service(transcription_model="somebody/something")
    audio.prepare(lambda step, part: None)
    assert len(audio.problems) == 1
    with pytest.raises(NotSupported, match=r"uv pip install .* mlx-audio==") as refused:
        audio.named("known", "transcription")
    assert refused.value.code == "extra_not_installed"
