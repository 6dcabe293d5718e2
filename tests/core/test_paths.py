"""``~`` in paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from start_llm.core.paths import expanded
from start_llm.launch.conversation import CommandError, image_part
from start_llm.models.checkpoint import is_path


def test_a_name_that_nobody_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expanded("~/x") == Path("/home/somebody/x") and expanded(Path("a/~")) == Path("a/~")
    assert expanded("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_it_is_a_sentence_and_no_traceback() -> None:
    with pytest.raises(CommandError, match="No such file"):
        image_part("~nobody-of-this-name/x.png")
    assert is_path("~nobody-of-this-name/x")
