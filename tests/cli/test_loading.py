"""``models load``: what is shown while it lasts."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from start_llm.cli import loading
from start_llm.core.settings import load_settings

DONE = {"id": "tiny", "context_length": 8, "details": {"state": "ready", "weight_bytes": 7_100_000_000}}
STEPS = [
    None,
    {"step": "reading tiny, 7.1 GB", "part": 0.0},
    {"step": "reading tiny, 7.1 GB", "part": 0.5},
    {"step": "loading tiny", "part": 0.2},
    {"step": "looking what tiny can do", "part": 0.0},
    None,
]


def test_the_steps_of_the_server_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()

    def cards(settings: Any) -> Iterator[Any]:
        now = STEPS.pop(0)
        if not STEPS:
            seen.set()
        yield {"id": "tiny", "details": {"state": "loading"} | ({"loading": now} if now else {})}

    def post(url: str, *_: Any) -> tuple[int, Any]:
        assert seen.wait(60)
        return 200, DONE

    monkeypatch.setattr(loading, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(loading, "server_state", lambda *_: "ready")
    monkeypatch.setattr(loading, "server_cards", lambda settings: cards(settings) if STEPS else [])
    monkeypatch.setattr(loading, "ask_json", post)
    monkeypatch.setattr("start_llm.dashboard.progress.LINE_SECONDS", 0.0)
    asked = argparse.Namespace(what="load", name="tiny", off=False, json=False)
    assert loading.change(load_settings(None), asked) == 0
    said = capsys.readouterr()
    assert said.out.startswith("tiny is loaded: 7.1 GB of weights, context 8 tokens, ")
    assert said.err.splitlines() == [
        "loading tiny ...",
        "reading tiny, 7.1 GB ...",
        "reading tiny, 7.1 GB: 50%",
        "reading tiny, 7.1 GB: done (0 s)",
        "loading tiny: 20%",
        "looking what tiny can do ...",
    ]
