"""Guesses of the recorder: whose they are, and what becomes of one while the recorder is closed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.prompt.recorder import Recorder

WAIT = 60.0


class Pipeline:
    def __init__(self) -> None:
        self.guessing, self.go_on = threading.Event(), threading.Event()

    def record(self, *job: Any) -> None:
        """Nothing is kept."""

    def predict(self, *job: Any) -> str:
        self.guessing.set()
        assert self.go_on.wait(WAIT)
        return "a guess"


def test_a_recorder_that_is_closed_while_it_guesses(caplog: pytest.LogCaptureFixture) -> None:
    pipeline, taken = Pipeline(), []
    recorder = Recorder(pipeline, lambda guess, *whose: taken.append(guess))  # type: ignore[arg-type]
    recorder.finish(SimpleNamespace(session="s"), None, ())  # type: ignore[arg-type]
    assert pipeline.guessing.wait(WAIT)
    closing = threading.Thread(target=recorder.close)
    closing.start()
    while recorder._anchor is not None:
        closing.join(0.01)
    pipeline.go_on.set()
    closing.join(WAIT)
    assert not caplog.records and taken == []


def test_a_guess_is_of_the_conversation_and_of_its_owner() -> None:
    pipeline, taken = Pipeline(), []
    pipeline.go_on.set()
    recorder = Recorder(pipeline, lambda *guess: taken.append(guess))  # type: ignore[arg-type]
    prepared = SimpleNamespace(session="s", request=SimpleNamespace(owner="ann"))
    recorder.finish(prepared, None, ())  # type: ignore[arg-type]
    recorder.flush()
    recorder.close()
    assert taken == [("a guess", "s", "ann")]
