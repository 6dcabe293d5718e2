"""The size of a prefill step, on machines that are a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from start_llm.engine.schedule.steps import ALONE_SECONDS, FIRST, MOST, SHARED_SECONDS, TIGHT, StepSize

GIB = 2**30
MIB = 2**20


def prefill(
    steps: StepSize,
    tokens: int,
    *,
    seconds: Callable[[int, int], float],
    nbytes: Callable[[int, int], float] = lambda tokens, context: tokens * 1000,
    shared: bool = False,
    start: int = 0,
) -> list[tuple[int, float, float]]:
    """(size, seconds, bytes) of every step of a prompt."""
    out, at = [], start
    while at < start + tokens:
        size = min(steps.next(at, shared=shared), start + tokens - at)
        took = size, seconds(size, at + size), nbytes(size, at + size)
        steps.measure(size, at + size, took[1], int(took[2]))
        out.append(took)
        at += size
    return out


def gpu(tokens: int, context: int) -> float:
    """What a step costs in any case, its tokens, and their attention."""
    return 0.05 + tokens / 2000 + tokens * context / 4e8


def test_a_fixed_size_stays() -> None:
    steps = StepSize(300, GIB)
    assert {size for size, _, _ in prefill(steps, 3000, seconds=lambda t, c: 100.0)} == {300}
    assert steps.next(0, shared=True) == 300


def test_steps_grow_while_nobody_waits() -> None:
    found = prefill(StepSize(None, GIB), 60_000, seconds=gpu)
    sizes = [size for size, _, _ in found]
    assert sizes[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert max(sizes) > 2 * FIRST
    assert max(seconds for _, seconds, _ in found) <= 1.25 * ALONE_SECONDS
    fixed = prefill(StepSize(512, GIB), 60_000, seconds=gpu)
    assert sum(s for _, s, _ in found) < 0.95 * sum(s for _, s, _ in fixed)


@pytest.mark.parametrize(("speed", "shared", "size"), [(20_000, False, MOST), (100, True, TIGHT)], ids=["fast", "slow"])
def test_a_fast_machine_takes_the_largest_and_a_slow_one_the_least(speed: int, shared: bool, size: int) -> None:
    found = prefill(StepSize(None, GIB), 30_000, seconds=lambda t, c: t / speed, shared=shared)
    assert found[-2][0] == size == max(tokens for tokens, _, _ in found[1:])


def test_steps_shrink_as_soon_as_somebody_waits_and_grow_again() -> None:
    steps = StepSize(None, GIB)
    alone = prefill(steps, 20_000, seconds=gpu)[-2][0]
    shared = prefill(steps, 5_000, seconds=gpu, shared=True, start=20_000)
    assert shared[0][0] < alone / 2
    assert max(seconds for _, seconds, _ in shared) <= 1.25 * SHARED_SECONDS
    assert steps.next(25_000, shared=False) > 2 * shared[-1][0]


def test_short_pieces_neither_grow_nor_shrink_the_steps() -> None:
    steps = StepSize(None, GIB)
    for _ in range(50):
        steps.measure(20, 1000, 3.0, 10 * MIB)
    assert steps.next(1000, shared=False) == FIRST


@pytest.mark.parametrize("start", [0, 100_000])
def test_memory_bounds_the_steps_where_attention_needs_it(start: int) -> None:
    """Where scores are held in full, a step takes heads x tokens x context."""
    steps = StepSize(None, GIB)
    prefill(steps, 3000, seconds=lambda t, c: t / 20_000, nbytes=lambda t, c: 32 * 2 * t * c)
    found = prefill(steps, 60_000, seconds=lambda t, c: t / 20_000, nbytes=lambda t, c: 32 * 2 * t * c, start=start)
    assert max(nbytes for _, _, nbytes in found) <= GIB
    assert found[-2][0] < 300  # 60,000 tokens of context leave room for 280
    assert min(size for size, _, _ in found[:-1]) >= TIGHT


def test_a_step_that_took_too_much_is_not_tried_again() -> None:
    steps = StepSize(None, 64 * MIB)
    sizes = [
        size for size, _, _ in prefill(steps, 20_000, seconds=lambda t, c: t / 9000, nbytes=lambda t, c: t * MIB // 2)
    ]
    assert sizes[0] == FIRST and max(sizes[1:]) <= 2 * TIGHT
