"""What passes are expected to cost, learnt from clocks that are noisy, bursty, wrong or hostile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.engine.decode.gate import MOST_WIDE, WIDTHS, PassCosts
from tests.kinds import rounds

Truth = Callable[[int, int], float]
CONTEXTS = (0, 64, 4096, 31_611, 41_218, 100_000, 200_000)


def at_12_ms(width: int, context: int) -> float:
    """Every pass takes about as long as any other."""
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


def learn(costs: PassCosts, truth: Truth, noise: Callable[[], float], context: int, factor: float = 1.0) -> None:
    """What some answers teach at this context."""
    for _ in range(4):
        for width in WIDTHS:
            costs.observe(width, context, factor * truth(width, context) * noise())
            costs.observe(1, context, factor * truth(1, context) * noise())


def off(costs: PassCosts, truth: Truth, context: int, widths: Iterable[int] = WIDTHS) -> float:
    """By how much the worst of these widths is wrong."""
    found = costs.by_width(context)
    return max(abs(found[width] / truth(width, context) - 1) for width in widths)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_was_seen_is_known(truth: Truth, seed: int) -> None:
    costs = PassCosts()
    learn(costs, truth, steady(seed), 4000)
    assert off(costs, truth, 4000) < 0.25


@pytest.mark.parametrize("truth", [at_12_ms, laptop])
def test_at_another_context_a_narrow_pass_tells_what_wide_ones_take(truth: Truth) -> None:
    costs = PassCosts()
    learn(costs, truth, steady(share=0.03), 4096)
    costs.observe(1, 200_000, truth(1, 200_000))
    assert off(costs, truth, 200_000) < 0.35


@pytest.mark.parametrize("truth", TRUTHS)
def test_one_accident_changes_little(truth: Truth) -> None:
    costs, noise = PassCosts(), steady()
    learn(costs, truth, noise, 1000)
    for width in (1, 8, 32):
        before = costs.by_width(1000)
        for accident in (30.0, 1e-6, float("inf"), float("nan"), -1.0, 0.0):
            costs.observe(width, 1000, accident)
            for _ in range(8):
                costs.observe(1, 1000, truth(1, 1000) * noise())
        assert costs.by_width(1000) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("factor", [0.05, 0.3, 3.0, 20.0])
def test_a_machine_that_is_quicker_or_slower_changes_all_widths(truth: Truth, factor: float) -> None:
    """Only narrow passes are seen, so what wide ones take is told by what the narrow ones took before."""
    costs, noise = PassCosts(), steady()
    learn(costs, truth, noise, 4000)
    for _ in range(10):
        costs.observe(1, 4000, factor * truth(1, 4000) * noise())
    assert off(costs, lambda width, context: factor * truth(width, context), 4000) < 0.35


@pytest.mark.parametrize("truth", TRUTHS)
def test_wide_passes_are_taken_to_be_cheap_until_one_was_tried(truth: Truth) -> None:
    costs = PassCosts()
    for _ in range(3):
        costs.observe(1, 2000, truth(1, 2000))
    assert costs.by_width(2000)[32] < 2 * costs.by_width(2000)[1]
    for number in range(30):
        width = (1, 8, 32)[number % 3]
        costs.observe(width, 2000, truth(width, 2000))
    assert off(costs, truth, 2000, [1, 8, 32]) < 0.25


def test_a_burst_over_wide_passes_changes_nothing_before_a_narrow_one_tells() -> None:
    costs = PassCosts()
    learn(costs, at_12_ms, steady(share=0.03), 41_000)
    for _ in range(4):
        costs.observe(32, 41_000, 4 * at_12_ms(32, 41_000))
    assert costs.wants_narrow and off(costs, at_12_ms, 41_000) < 0.25
    costs.observe(1, 41_000, 4 * at_12_ms(1, 41_000))  # a burst
    assert not costs.wants_narrow and off(costs, at_12_ms, 41_000) < 0.25
    for _ in range(7):
        costs.observe(32, 41_000, 4 * at_12_ms(32, 41_000))
        costs.observe(1, 41_000, at_12_ms(1, 41_000))
    assert costs.by_width(41_000)[32] > 2.5 * costs.by_width(41_000)[1], "it is the width"


def test_rows_that_decode_together_make_no_narrow_pass_and_costs_are_learnt_all_the_same() -> None:
    costs = PassCosts()
    for _ in range(30):
        costs.observe(2, 5000, without_gpu(2, 5000))
        costs.observe(32, 5000, without_gpu(32, 5000))
    found, truth = costs.by_width(5000), without_gpu(32, 5000) / without_gpu(2, 5000)
    assert found[32] / found[2] == pytest.approx(truth, rel=0.25)


passes = st.tuples(
    st.integers(1, 4096),
    st.integers(0, 300_000),
    st.one_of(st.floats(1e-5, 50.0), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])),
)


@settings(max_examples=rounds(150), deadline=None)
@given(st.lists(passes, max_size=60))
def test_whatever_a_clock_says_wide_passes_cost_more_and_no_more_than_their_tokens(
    seen: list[tuple[int, int, float]],
) -> None:
    costs = PassCosts()
    for one in seen:
        costs.observe(*one)
    slack = 1 + 1e-9
    for row in (costs.by_width(context)[1:] for context in CONTEXTS):
        assert all(math.isfinite(value) and value > 0 for value in row)
        assert min(row) == row[0]
        assert all(row[width - 1] <= width * row[0] * slack for width in range(1, MOST_WIDE + 1))
