"""What is done on another thread ends a step, however quick it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from start_llm.models import background as module
from start_llm.models.background import at_once, in_background


class AtOnce:
    """A thread that is done when it has begun."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


def test_others_have_a_turn_even_if_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.threading, "Thread", AtOnce)
    steps = in_background(lambda: "found")
    assert next(steps) == 0.0
    with pytest.raises(StopIteration, match="found"):
        next(steps)


def test_what_it_raises_is_raised() -> None:
    def fails() -> None:
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        at_once(in_background(fails))


def test_who_gives_up_hears_of_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.threading, "Thread", AtOnce)
    late: list[str] = []
    steps = in_background(lambda: "found", late.append)
    next(steps)
    steps.close()
    assert late == ["found"]
