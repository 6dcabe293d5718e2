"""What is said of a start that nobody waits for any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from start_llm.core.settings import load_settings
from start_llm.service import control
from start_llm.service.place import Place


def test_who_interrupts_a_start_is_told_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "is_free", lambda *_: True)
    monkeypatch.setattr(control, "spawn", lambda *_: SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(control, "_answers_before", interrupted)
    settings = load_settings(None, start_llm_cache_dir=tmp_path, log_root=tmp_path, mlx_port=1)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        control.bring_up(settings, Place(settings), {}, said.append)
    assert said[-1].startswith("the server goes on starting; ") and said[-1].endswith(" stop --port 1` ends it")
