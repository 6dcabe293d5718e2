from __future__ import annotations

from pathlib import Path

import pytest

from start_llm.core.extras import is_installed
from tests.audio.tiny import build_whisper
from tests.audio.voice import build_voice


@pytest.fixture(scope="session")
def needs_library() -> None:
    if not is_installed("mlx_audio"):
        pytest.skip("mlx-audio is not installed: pip install '.[audio]' -c constraints.txt")


@pytest.fixture(scope="session")
def whisper_path(needs_library: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_whisper(tmp_path_factory.mktemp("whisper") / "tiny-whisper")


@pytest.fixture(scope="session")
def voice_path(needs_library: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_voice(tmp_path_factory.mktemp("voice") / "tiny-voice")
