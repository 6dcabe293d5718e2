"""How rows that decode and prompts that are computed share the model's time, by a clock that the fake model moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from start_llm.engine.decode.row import DecodeRow
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.scheduler import Scheduler, SchedulerLimits
from start_llm.engine.schedule.steps import DecodeShare
from tests.engine.fakes import FakeDrawing, FakeRunner, FakeStore, FixedMemory, submit

PASS = 0.06
"""Seconds of a decode pass of a large model; a chunk of n tokens takes 1 + n/16 times that."""
PROMPT = 30_000


@dataclass
class SlowRunner(FakeRunner):
    """Each pass takes the time that it would take on the machine."""

    now: float = 0.0
    passes: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    answer: int = 10**9

    def clock(self) -> float:
        return self.now

    def prefill(self, cache: list[Any], tokens: Sequence[int], images: Sequence[Any] = ()) -> int:
        self.chunks.append(PASS * (1 + len(tokens) / 16))
        self.now += self.chunks[-1]
        return super().prefill(cache, tokens, images)

    def decode(self) -> list[DecodeRow]:
        self.now += PASS
        self.passes.append(self.now)
        return super().decode()


def scheduler_of(runner: SlowRunner, share: float) -> Scheduler:
    guarded = GuardedStore(FakeStore(), list)  # type: ignore[arg-type]
    return Scheduler(
        runner,
        guarded,
        FakeDrawing,
        limits=SchedulerLimits(None, decode_share=share),
        max_concurrency=8,
        memory=MemoryGuard(guarded, FixedMemory()),
        clock=runner.clock,
    )


def prefilled(share: float, rows: int) -> SlowRunner:
    """A prompt is computed beside so many rows that decode. Passes and chunks are those from its arrival on."""
    runner = SlowRunner()
    scheduler = scheduler_of(runner, share)
    for number in range(rows):
        scheduler.add(submit(f"row {number}", [number + 1, 2, 3], max_tokens=10**6)[0])
    for _ in range(20):
        scheduler.step()
    runner.passes.clear()
    runner.chunks.clear()
    runner.now = 0.0
    work, _ = submit("prompt", range(10, PROMPT + 10), max_tokens=5)
    scheduler.add(work)
    while runner.work < PROMPT - 1:
        scheduler.step()
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
    while scheduler.idle_prefill.waiting:
        scheduler.idle_prefill.step()
    assert max(runner.chunks) < 0.6 and len(runner.chunks) > 10
