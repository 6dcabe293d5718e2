"""Recordings to text, and text to speech, top to bottom: names, a hold on the model, steps on the model thread.

Runs on HTTP threads. Audio models are models of the pool: loaded when they are asked for, unloaded for others, under
the same budget. A request holds its model until it is over.
"""

from __future__ import annotations

import contextlib
import functools
import re
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from start_llm.audio.samples import LIBRARY, RATE, encode, look_at, samples_of
from start_llm.chat.handle import WAIT_SECONDS, Lease, still_loading
from start_llm.core.errors import BadRequest, NotFound, NotSupported, StartLLMError, Unavailable
from start_llm.core.events import Progress
from start_llm.core.extras import check_installed
from start_llm.core.limits import RECORDED, Allowance
from start_llm.core.media import AudioTask, Computation, Hints, Sound, SoundForm, Transcript
from start_llm.core.settings import Settings
from start_llm.embeddings.checkpoint import whole_encoder
from start_llm.engine.thread import EngineThread
from start_llm.models.checkpoint import SETTINGS, architectures_of, read_config, task_of
from start_llm.models.pull import find_folder

STEP_SECONDS = 0.1
"""What the work of one step may take, so that a row that decodes hardly waits; a step of the model is not cut."""
LOOK_SECONDS = 0.5  # how often one that waits shows life
SHORT, LONGEST = 30, 300
_WRITTEN_SPACE = re.compile(r"\\[nt]")
"""A line's end or a tab written as a backslash and a letter: mlx-audio begins a new sound there."""
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？]) ")


class AudioModels(Protocol):
    """See `modelpool.pool.Pool`."""

    def audio_name(self, asked: str, task: AudioTask) -> str: ...

    def open_audio(self, name: str, task: AudioTask) -> Lease[Any]: ...


class AudioService:
    """Thread-safe; called on HTTP threads."""

    def __init__(self, settings: Settings, models: AudioModels, thread: EngineThread) -> None:
        transcription, speech = settings.transcription_model, settings.speech_model
        self._sources: dict[AudioTask, str | None] = {"transcription": transcription, "speech": speech}
        self._models, self._thread = models, thread
        self._problems: dict[AudioTask, StartLLMError] = {}
        self._memory = Allowance(RECORDED.most)  # seconds of sound that may be in memory at a time
        self._heard = 0.0
        self._spoken = 0.0
        self._counting = threading.Lock()

    def prepare(self, progress: Callable[[str, float], None]) -> None:
        """Finds what the settings name, fetches it if need be; once, before any request."""
        for task, source in self._sources.items():
            if source is None:
                continue
            try:
                check_installed(LIBRARY)
                config = read_config(find_folder(source, SETTINGS[task], progress, whole_encoder))
                if task_of(config) != task:
                    why = (
                        f"its architecture is {config.get('model_type')!r}; for this there is {architectures_of(task)}."
                    )
                    raise NotSupported(f"{SETTINGS[task]}={source}: {why}")
            except (StartLLMError, OSError, ValueError) as error:
                known = error if isinstance(error, StartLLMError) else NotFound(f"{SETTINGS[task]}={source}: {error}")
                self._problems[task] = known.again()

    @property
    def problems(self) -> list[str]:
        """Why there is no speech although the settings name a model for it."""
        return [error.message for error in self._problems.values()]

    def named(self, asked: str, task: AudioTask) -> str:
        """The name of the model that `asked` means for this task. Raises BadRequest, NotFound, NotSupported."""
        check_installed(LIBRARY)
        try:
            return self._models.audio_name(asked, task)
        except (NotFound, NotSupported):
            if task in self._problems:
                raise self._problems[task].again() from None
            raise

    def figures(self) -> dict[str, float]:
        """Totals, by the names that `/metrics` shows."""
        return {"transcribed_seconds": self._heard, "spoken_seconds": self._spoken}

    def transcribe(self, model: str, file: bytes, hints: Hints) -> Computation[Transcript]:
        """`model`: as `named` says."""
        recording = look_at(file, "file")
        if recording.seconds > RECORDED.most:
            length = f"a recording of {recording.seconds:,.0f} seconds; at most {RECORDED.most:,} are allowed"
            raise BadRequest(f"file: {length}; send it in parts.", param="file", code="limit_exceeded")
        with contextlib.closing(self._models.open_audio(model, "transcription")) as lease:
            yield from _waiting(lease.wait, still_loading(model))
            listener = lease.handle
            hints = Hints(listener.check(hints.language), hints.prompt, hints.temperature)
            taking = functools.partial(self._memory.take, recording.seconds)
            yield from _waiting(taking, "Other recordings are still in memory, and this one has no room beside them.")
            try:
                samples = samples_of(recording, "file")
                found: Transcript = yield from self._steps(listener.transcribe(samples, hints), len(samples) / RATE)
            finally:
                self._memory.give_back(recording.seconds)
        with self._counting:
            self._heard += found.seconds
        return found

    def speak(self, model: str, text: str, form: SoundForm) -> Computation[bytes]:
        """`text` is not blank. The result is a file."""
        pieces = pieces_of(text)
        with contextlib.closing(self._models.open_audio(model, "speech")) as lease:
            yield from _waiting(lease.wait, still_loading(model))
            found: Sound = yield from self._steps(lease.handle.speak(pieces), len(pieces))
        with self._counting:
            self._spoken += len(found.samples) / found.rate
        return encode(found, form)

    def _steps(self, work: Generator[float, None, Any], seconds: float) -> Generator[Progress, None, Any]:
        """Has the model thread do `work`, a while at a time; given up, it is ended there, too."""
        try:
            while True:
                done, result = self._thread.chore(_slice(work))
                if done is None:
                    return result
                yield Progress(int(done), int(seconds))
        except GeneratorExit:
            with contextlib.suppress(StartLLMError):  # the thread has ended, or hangs: nothing will be computed there
                self._thread.chore(_ending(work))
            raise


def pieces_of(text: str) -> list[str]:
    """Sentences, the short ones together, none longer than `LONGEST`: each is a step of the model."""
    pieces: list[str] = []
    for sentence in _SENTENCE_END.split(" ".join(_WRITTEN_SPACE.sub(" ", text).split())):
        for part in textwrap.wrap(sentence, LONGEST):
            if pieces and len(pieces[-1]) < SHORT and len(pieces[-1]) + len(part) < LONGEST:
                pieces[-1] += f" {part}"
            else:
                pieces.append(part)
    return pieces


def _waiting(there: Callable[[float], bool], problem: str) -> Generator[Progress]:
    """Signs of life until it is `there`, which is given the seconds that it may take to look.

    Raises Unavailable with `problem` after `WAIT_SECONDS`.
    """
    until = time.monotonic() + WAIT_SECONDS
    while not there(LOOK_SECONDS):
        if time.monotonic() > until:
            raise Unavailable(problem)
        yield Progress(0, 0)


def _slice(work: Generator[float, None, Any]) -> Generator[float, None, tuple[float | None, Any]]:
    """A step of the model thread. Returns what is done, or ``None`` and the result."""
    yield 0.0
    began = time.monotonic()
    while True:
        try:
            done = next(work)
        except StopIteration as end:
            return None, end.value
        if time.monotonic() - began >= STEP_SECONDS:
            return done, None


def _ending(work: Generator[float, None, Any]) -> Generator[float]:
    """What `work` holds is given back on the thread that made it."""
    work.close()
    yield 0.0
