"""How rows that decode and prompts that are computed share the model's time, by a clock that the fake model moves."""

from __future__ import annotations

import pytest

from start_llm.engine.schedule.steps import DecodeShare
from tests.engine.fakes import PASS, SlowRunner, ask, scheduler_of, steps, steps_until, submit
from tests.engine.schedule.test_scheduler import idle

PROMPT = 30_000


def prefilled(share: float, rows: int) -> SlowRunner:
    """A prompt is computed beside so many rows that decode. Passes and chunks are those from its arrival on."""
    runner = SlowRunner()
    scheduler = scheduler_of(runner, share)
    for number in range(rows):
        ask(scheduler, f"row {number}", [number + 1, 2, 3], max_tokens=10**6)
    steps(scheduler, 20)
    runner.passes.clear()
    runner.chunks.clear()
    runner.now = 0.0
    ask(scheduler, "prompt", range(10, PROMPT + 10), max_tokens=5)
    steps_until(scheduler, lambda: runner.work >= PROMPT - 1)
    return runner


@pytest.mark.parametrize("rows", [1, 3])
def test_an_answer_goes_on_beside_a_prefill_and_both_have_about_half(rows: int) -> None:
    alone, shared = prefilled(0.5, rows=0), prefilled(0.5, rows=rows)
    assert len(shared.passes) / (shared.now / PASS) >= 0.4
    assert shared.now <= 2.1 * alone.now
    assert max(shared.chunks) < 0.5
    gaps = [after - before for before, after in zip([0.0, *shared.passes], shared.passes, strict=False)]
    assert max(gaps) < 0.7
    assert max(alone.chunks) > 1.5, "without anybody else a chunk is large"


def test_the_share_is_what_the_rows_get() -> None:
    speeds = [len(one.passes) / (one.now / PASS) for one in (prefilled(share, rows=1) for share in (0.0, 0.25, 0.75))]
    assert speeds[0] < 0.15 < speeds[1] < 0.3 < 0.6 < speeds[2] < 0.8


def test_half_a_pass_is_no_reason_for_another_one_and_nothing_is_saved_up() -> None:
    share = DecodeShare(0.5)
    for _ in range(100):
        share.decoded(0.06)
    share.prefilled(0.36)
    passes = 0
    while not share.may_prefill:
        share.decoded(0.06)
        passes += 1
    assert passes in (4, 5)


def test_idle_work_takes_moments() -> None:
    runner = SlowRunner()
    scheduler = scheduler_of(runner, 0.5)
    scheduler.idle_prefill.begin(submit("idle", range(1, 2000))[0])
    idle(scheduler)
    assert max(runner.chunks) < 0.6 and len(runner.chunks) > 10
