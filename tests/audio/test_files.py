"""What the files of audio models are said to be, before anything of them is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from start_llm.models.catalog import describe
from start_llm.models.checkpoint import CheckpointError, check_source, task_of


def test_an_audio_model_is_listed_by_what_it_does(whisper_path: Path, voice_path: Path) -> None:
    listener, speaker = describe("listener", whisper_path), describe("speaker", voice_path)
    assert (listener.can, listener.problem) == (("transcription",), "")
    assert (speaker.can, speaker.context) == (("speech",), None)
    assert task_of({"model_type": "qwen3"}) is None


def test_as_the_main_model_it_is_refused_with_what_to_do(whisper_path: Path, voice_path: Path) -> None:
    for folder, setting in ((whisper_path, "TRANSCRIPTION_MODEL"), (voice_path, "SPEECH_MODEL")):
        with pytest.raises(CheckpointError, match=f"is an audio model .*: {setting}="):
            check_source(str(folder), command="x")


@pytest.mark.parametrize(
    ("file", "said"),
    [("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer"), ("", "cut short")],
)
def test_what_is_missing_is_told(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    for name in {"model.safetensors", "tokenizer.json"} - {file}:
        header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 if file else 4))
    assert said in describe("it", tmp_path).problem
