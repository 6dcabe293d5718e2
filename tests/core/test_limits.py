"""What all requests together may hold."""

from __future__ import annotations

from start_llm.core.limits import Allowance


def test_an_allowance_takes_what_is_larger_than_all_of_it() -> None:
    room = Allowance(10.0)
    assert room.take(25.0)
    assert not room.take(0.5)
    room.give_back(25.0)
    assert room.take(10.0)
