"""What passes are expected to cost, learnt from clocks that are noisy, bursty, wrong or hostile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.engine.decode.costs import MOST_WIDE, WIDTHS, PassCosts

Truth = Callable[[int, int], float]
CONTEXTS = (0, 64, 4096, 31_611, 41_218, 100_000, 200_000)


def at_12_ms(width: int, context: int) -> float:
    """The served session that was recorded: every pass took about as long as any other."""
    return 0.012 * (1 + width / 100)


def laptop(width: int, context: int) -> float:
    """Narrow passes read weights and KV; wide ones compute, in steps."""
    step = 0.006 * (max(0, min(width, 6) - 2) + 3 * (width > 8))
    return 0.025 + step + 0.0004 * width + 1e-7 * context + 1e-8 * context * width


def without_gpu(width: int, context: int) -> float:
    return 0.1 + 0.02 * width + 5e-7 * context * width


TRUTHS = [at_12_ms, laptop, without_gpu]


def steady(seed: int = 1, share: float = 0.1) -> Callable[[], float]:
    chance = random.Random(seed)
    return lambda: max(0.5, chance.gauss(1, share))


def load(costs: PassCosts, truth: Truth, noise: Callable[[], float], widths: Iterable[int] = WIDTHS) -> None:
    """What is measured when a model is loaded."""
    for context in (64, 4096):
        for width in widths:
            costs.observe(width, context, truth(width, context) * noise())


def prefill(costs: PassCosts, truth: Truth, noise: Callable[[], float], tokens: int) -> None:
    for at in range(0, tokens, 512):
        costs.observe(512, at + 256, truth(512, at + 256) * noise())


def off(costs: PassCosts, truth: Truth, context: int, widths: Iterable[int] = WIDTHS) -> float:
    """By how much the worst of these widths is wrong."""
    return max(abs(costs.seconds(width, context) / truth(width, context) - 1) for width in widths)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_can_be_trusted_far_behind_what_was_measured(truth: Truth, seed: int) -> None:
    """One decode pass at 200,000 tokens, behind the prefill that leads there, or behind restored KV."""
    costs, noise = PassCosts(), steady(seed)
    load(costs, truth, noise)
    assert off(costs, truth, 64) < 0.25 and off(costs, truth, 4096) < 0.25
    prefill(costs, truth, noise, 200_000)
    costs.observe(1, 200_000, truth(1, 200_000))
    assert off(costs, truth, 200_000) < 0.25
    restored = PassCosts()
    load(restored, truth, noise)
    restored.observe(1, 200_000, truth(1, 200_000))
    assert off(restored, truth, 200_000, [1]) < 0.25


@pytest.mark.parametrize("context", [31_611, 41_218])
@pytest.mark.parametrize("wrong", [(0.213, 0.0012), (0.011, 0.136)])
def test_the_session_in_which_nothing_was_drafted(context: int, wrong: tuple[float, float]) -> None:
    """At 31,611 tokens a table held 213 ms for one token and 1.2 ms for two, at 41,218 11 and 136; all took 12."""
    costs = PassCosts()
    load(costs, at_12_ms, steady(share=0.03))
    for width, seconds in enumerate(wrong, 1):  # two passes of these times are two accidents
        costs.observe(width, context, seconds)
    for number in range(10):
        costs.observe(1 + number % 2, context, at_12_ms(1 + number % 2, context))
    assert off(costs, at_12_ms, context) < 0.25
    for _ in range(200):  # a gate that is shut sees narrow passes only
        costs.observe(1, context, at_12_ms(1, context))
        assert off(costs, at_12_ms, context) < 0.25


@pytest.mark.parametrize("truth", TRUTHS)
def test_one_accident_changes_little(truth: Truth) -> None:
    costs, noise = PassCosts(), steady()
    load(costs, truth, noise)
    for _ in range(20):
        costs.observe(1, 1000, truth(1, 1000) * noise())
    before = [costs.seconds(width, 1000) for width in WIDTHS]
    for accident in (30.0, 1e-6, float("inf"), float("nan"), -1.0, 0.0):
        costs.observe(1, 1000, accident)
    assert [costs.seconds(width, 1000) for width in WIDTHS] == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_change_of_power_mode_changes_all_widths(truth: Truth, factor: float) -> None:
    """Only narrow passes are seen, so what wide ones take is told by what the narrow ones took before."""
    costs, noise = PassCosts(), steady()
    load(costs, truth, noise)
    for _ in range(100):
        costs.observe(1, 4000, truth(1, 4000) * noise())
    for _ in range(10):
        costs.observe(1, 4000, factor * truth(1, 4000) * noise())
    assert off(costs, lambda width, context: factor * truth(width, context), 4000) < 0.35


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("busy", [5.0, 20.0])
def test_a_machine_that_was_busy_while_the_model_was_loaded(truth: Truth, busy: float) -> None:
    costs, noise = PassCosts(), steady()
    load(costs, lambda width, context: busy * truth(width, context), noise)
    for _ in range(12):
        costs.observe(1, 700, truth(1, 700) * noise())
    assert off(costs, truth, 700) < 0.4


@pytest.mark.parametrize("truth", TRUTHS)
def test_nothing_was_measured(truth: Truth) -> None:
    """Wide passes are taken to be cheap until one was tried."""
    costs = PassCosts()
    for _ in range(3):
        costs.observe(1, 2000, truth(1, 2000))
    assert costs.seconds(32, 2000) < 2 * costs.seconds(1, 2000)
    for number in range(30):
        width = (1, 8, 32)[number % 3]
        costs.observe(width, 2000, truth(width, 2000))
    assert off(costs, truth, 2000, [1, 8, 32]) < 0.25


def test_bursts_pass_by() -> None:
    costs, noise, chance = PassCosts(), steady(), random.Random(7)
    load(costs, laptop, noise)
    for _ in range(40):
        for _ in range(chance.randint(1, 8)):  # somebody else's burst
            costs.observe(1, 3000, chance.uniform(2, 6) * laptop(1, 3000))
        for _ in range(chance.randint(20, 60)):
            costs.observe(chance.choice([1, 1, 1, 4, 16]), 3000, laptop(1, 3000) * noise())
    for number in range(30):
        width = (1, 4, 16)[number % 3]
        costs.observe(width, 3000, laptop(width, 3000))
    assert off(costs, laptop, 3000, [1, 4, 16]) < 0.25


def test_a_burst_over_wide_passes_changes_nothing_before_a_narrow_one_tells() -> None:
    costs = PassCosts()
    load(costs, at_12_ms, steady(share=0.03))
    for number in range(12):
        width = (1, 32)[number % 2]
        costs.observe(width, 41_000, at_12_ms(width, 41_000))
    for _ in range(8):
        costs.observe(32, 41_000, 4 * at_12_ms(32, 41_000))
    assert costs.wants_narrow and off(costs, at_12_ms, 41_000) < 0.25
    costs.observe(1, 41_000, 4 * at_12_ms(1, 41_000))  # a burst
    assert not costs.wants_narrow and off(costs, at_12_ms, 41_000) < 0.25
    costs.observe(32, 41_000, 4 * at_12_ms(32, 41_000))
    costs.observe(1, 41_000, at_12_ms(1, 41_000))
    costs.observe(32, 41_000, 4 * at_12_ms(32, 41_000))  # it is the width
    assert costs.seconds(32, 41_000) > 2.5 * costs.seconds(1, 41_000)


@pytest.mark.parametrize("wrong", [2e-6, 1e-4, 3000.0])
def test_one_wrong_time_of_a_width_that_is_new_changes_little(wrong: float) -> None:
    costs = PassCosts()
    load(costs, laptop, steady(share=0.03))
    for _ in range(10):
        costs.observe(1, 41_000, laptop(1, 41_000))
        costs.observe(12, 41_000, laptop(12, 41_000))
    costs.observe(48, 41_000, wrong)
    assert off(costs, laptop, 41_000, [1, 8, 12, 16]) < 0.25


def test_a_window_costs_no_more_once_it_is_full() -> None:
    def windowed(width: int, context: int) -> float:
        return 0.01 + 4e-6 * min(context, 1024)

    costs = PassCosts(window=1024)
    for context in (64, 512, 1024, 4096):
        for _ in range(3):
            costs.observe(1, context, windowed(1, context))
    costs.observe(1, 50_000, windowed(1, 50_000))
    assert max(off(costs, windowed, context, [1]) for context in (64, 512, 4096, 50_000, 200_000)) < 0.25


passes = st.tuples(
    st.integers(1, 4096),
    st.integers(0, 300_000),
    st.one_of(st.floats(1e-5, 50.0), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(passes, max_size=60), st.sampled_from([0, 512]))
def test_whatever_a_clock_says_costs_are_monotone_and_within_what_was_seen(
    seen: list[tuple[int, int, float]], window: int
) -> None:
    costs = PassCosts(window)
    for one in seen:
        costs.observe(*one)
    rows = [[costs.seconds(width, context) for width in range(1, MOST_WIDE + 1)] for context in CONTEXTS]
    assert all(math.isfinite(value) and value > 0 for row in rows for value in row)
    slack = 1 + 1e-9
    assert all(a <= b * slack for row in rows for a, b in pairwise(row))
    assert all(a <= b * slack for low, high in pairwise(rows) for a, b in zip(low, high, strict=True))
    assert all(row[width - 1] <= width * row[0] * slack for row in rows for width in range(1, MOST_WIDE + 1))
    real = [one for one in seen if 1e-6 < one[2] < 3600]
    if real:
        quickest, slowest = min(one[2] for one in real), max(one[2] for one in real)
        longest = max(1, *(one[1] for one in real))
        for context, row in zip(CONTEXTS, rows, strict=True):
            assert quickest <= row[0] * slack and row[0] <= slowest * max(1.0, context / longest) * slack


def test_what_no_coefficients_explain_is_not_fitted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = PassCosts()
    for _ in range(10):
        costs.observe(1, 64, 0.014)  # no pass is slower where the context is shorter
    fits = Mock(side_effect=costs._fit)
    monkeypatch.setattr(costs, "_fit", fits)
    for number in range(1000):
        costs.observe(1, 1000, 0.010)
        if number % 20 == 0:
            costs.observe(1, 64, 0.014)
    assert 0 < fits.call_count < 40
    assert costs.seconds(1, 1000) == pytest.approx(0.012, rel=0.25)
