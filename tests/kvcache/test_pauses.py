from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.kvcache.pauses import Pauses, rate_of_return

SECONDS = st.lists(st.floats(0.1, 1e5), max_size=40)


def of(*seconds: float, most: int = 1000) -> Pauses:
    pauses = Pauses(most)
    for each in seconds:
        pauses.add(each)
    return pauses


@given(SECONDS, st.floats(0, 1e5), st.floats(0.1, 1e5), st.integers(1, 10))
def test_the_last_pauses_are_counted(seconds: list[float], silence: float, soon: float, most: int) -> None:
    lasted = [s for s in seconds[-most:] if s >= silence]
    ended, of_these, waited = of(*seconds, most=most).ended(silence, soon)
    assert (ended, of_these) == (sum(s < silence + soon for s in lasted), len(lasted))
    assert waited == pytest.approx(sum(min(s - silence, soon) for s in lasted), abs=1e-3)


@given(SECONDS, SECONDS, st.lists(st.floats(0, 1e5), max_size=5), st.floats(0, 1e5))
def test_a_rate_has_bounds(own: list[float], others: list[float], silences: list[float], silence: float) -> None:
    rate = rate_of_return(silence, of(*own), of(*own, *others), sorted(silences))
    assert 0 <= rate <= (len(own) + 10) / 40


def test_of_two_that_come_back_soon_the_quicker_one_is_stronger() -> None:
    quick, slow = of(*[5.0] * 20), of(*[35.0] * 20)
    assert rate_of_return(2.0, quick, of(), []) > 2 * rate_of_return(2.0, slow, of(), [])


@given(SECONDS, st.floats(0, 1e5), st.floats(0, 1e5))
def test_who_is_silent_for_longer_than_anybody_ever_was_comes_back_last(
    seconds: list[float], silence: float, more: float
) -> None:
    everyone, longest = of(*seconds), max(seconds, default=0.0)
    beyond = rate_of_return(longest + more + 0.1, of(), everyone, [])
    assert beyond == 0 <= rate_of_return(silence, of(), everyone, [])


def test_habits_of_a_conversation_outweigh_those_of_others() -> None:
    everyone = of(*[10.0] * 100)
    timer = of(*[600.0] * 20)
    assert rate_of_return(580.0, timer, everyone, []) > rate_of_return(580.0, of(), everyone, [])
    assert rate_of_return(100.0, timer, everyone, []) < rate_of_return(5.0, of(), everyone, [])


def test_a_silence_that_goes_on_counts_as_a_pause_that_has_not_ended() -> None:
    everyone = of(*[10.0, 100.0] * 5)
    assert rate_of_return(90.0, of(), everyone, [90.0] * 5) < rate_of_return(90.0, of(), everyone, [90.0])
