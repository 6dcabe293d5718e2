"""A step that fails: who is to blame ends, everybody else goes on with the very same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from start_llm.core.events import Failed
from start_llm.engine.decode.row import DecodeRow
from tests.engine.fakes import Collected, FakeRunner, FakeStore, ask, steps, steps_until
from tests.engine.schedule.test_scheduler import drain, make

POISON = 666


class Failing(FakeRunner):
    """`decode` raises while `when(rows)` is true, after half of the rows have been stepped."""

    when: Callable[[FakeRunner], bool] = staticmethod(lambda runner: False)

    def decode(self) -> list[DecodeRow]:
        if self.when(self):
            for row in list(self.rows.values())[: len(self.rows) // 2]:
                row[0].append(13)
            raise RuntimeError("the step failed")
        return super().decode()


def poisoned(runner: FakeRunner) -> bool:
    return any(POISON in row[0] for row in runner.rows.values())


def crowded(runner: FakeRunner) -> bool:
    return len(runner.rows) > 1


PROMPTS = [[*range(1, 40), i, i + 3, i * 7] for i in range(1, 7)]


def answers(runner: FakeRunner, prompts: list[list[int]], **more: Any) -> list[Collected]:
    scheduler, *_ = make(runner, **more)
    sinks = [ask(scheduler, f"r{i}", prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    drain(scheduler)
    assert not runner.rows
    return sinks


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [sink.tokens for sink in answers(FakeRunner(answer=20), PROMPTS)]


@pytest.mark.parametrize("cuttable", [True, False])
@pytest.mark.parametrize("at", [1, 2, 7, 15])
def test_a_step_that_fails_once_changes_no_answer(expected: list[list[int]], at: int, cuttable: bool) -> None:
    runner = Failing(answer=20)
    runner.when = lambda r: r.steps == at and not setattr(r, "steps", at + 1)  # once
    sinks = answers(runner, PROMPTS, store=FakeStore(cuttable))
    assert [sink.tokens for sink in sinks] == expected
    assert [sink.done.reason for sink in sinks] == ["stop"] * len(PROMPTS)
    assert [len(sink.done.tokens) for sink in sinks] == [21] * len(PROMPTS)


@pytest.mark.parametrize("together", [True, False], ids=["they come together", "some come meanwhile"])
def test_the_row_to_blame_is_found_and_the_others_go_on(expected: list[list[int]], together: bool) -> None:
    runner = Failing(answer=20)
    runner.when = poisoned
    scheduler, *_ = make(runner)
    sinks = []
    for number, prompt in enumerate([*PROMPTS[:3], [5, POISON, 6, 7], *PROMPTS[3:]]):
        sinks.append(ask(scheduler, f"r{number}", prompt, max_tokens=30))
        steps(scheduler, 0 if together else 1)
    drain(scheduler)
    bad = sinks.pop(3)
    assert isinstance(bad.final, Failed)
    assert "the step failed" in bad.final.error.message and bad.final.error.status == 500
    assert [sink.tokens for sink in sinks] == expected


def test_rows_that_cannot_run_together_run_one_after_the_other(expected: list[list[int]]) -> None:
    runner = Failing(answer=20)
    runner.when = crowded
    sinks = answers(runner, PROMPTS)
    assert [sink.tokens for sink in sinks] == expected
    assert runner.widest == 1


@pytest.mark.parametrize("short_of", ["places", "memory"])
def test_others_that_hold_what_those_of_the_failed_step_need_end_before_them(short_of: str) -> None:
    """They had waited for one another for ever."""
    runner, failed = Failing(answer=1200), list[int]()
    store, memory, sinks = FakeStore(token_bytes=2**20), 0, list[Collected]()
    if short_of == "places":
        runner.max_rows = 2
    else:
        memory = 3700 * 2**20
    scheduler, *_ = make(runner, store, memory=memory)

    def add(length: int, most: int) -> None:
        first = 10_000 * len(sinks)
        sink = ask(scheduler, f"r{len(sinks)}", range(first, first + length), max_tokens=most)
        sinks.append(sink)

    add(100, 5000)
    steps_until(scheduler, lambda: len(sinks[0].tokens) >= 1100)
    add(10, 300)
    steps_until(scheduler, lambda: sinks[1].tokens)
    add(*((50, 100) if short_of == "places" else (900, 5000)))
    add(50, 100)
    runner.when = lambda rows: len(rows.rows) == 2 and not failed and not failed.append(1)
    steps(scheduler, 5000)
    assert failed and not scheduler.busy and [sink.done.reason for sink in sinks[:2]] == ["stop", "length"]


def add_all(scheduler: Any) -> list[Any]:
    """Submits all prompts as ``r0``, ``r1``, ... Their sinks."""
    return [ask(scheduler, f"r{i}", prompt, max_tokens=30) for i, prompt in enumerate(PROMPTS)]


class Lending(FakeStore):
    """Notes whether what it takes back may still be used."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool] = []

    def take_back(self, cache: list[Any], *, valid: bool = True) -> None:
        self.taken.append(valid)


def test_a_row_that_cannot_be_taken_out_gives_its_kv_up_and_costs_the_others_no_token(
    expected: list[list[int]],
) -> None:
    class Stuck(FakeRunner):
        def remove(self, uid: int) -> Any:
            raise RuntimeError("of the device")

    runner, store = Stuck(answer=20), Lending()
    scheduler, *_ = make(runner, store=store)
    sinks = add_all(scheduler)
    steps_until(scheduler, lambda: len(sinks[2].tokens) >= 6)
    store.taken.clear()
    scheduler.requests.cancel("r2")
    scheduler.step()
    assert store.taken and not any(store.taken)
    drain(scheduler)
    gone = sinks.pop(2)
    assert gone.done.reason == "cancelled"
    assert [sink.tokens for sink in sinks] == expected[:2] + expected[3:]
    assert not runner.rows


def test_a_runner_that_cannot_be_cleared_at_once_costs_no_token(expected: list[list[int]]) -> None:
    class Stuck(Failing):
        stuck = True

        def clear(self) -> None:
            if self.stuck:
                self.stuck = False
                raise RuntimeError("not now")
            super().clear()

    runner = Stuck(answer=20)
    runner.when = lambda r: r.steps == 5 and not setattr(r, "steps", 6)
    scheduler, *_ = make(runner)
    sinks = add_all(scheduler)
    with pytest.raises(RuntimeError, match="not now"):
        drain(scheduler)
    scheduler.recover(RuntimeError("not now"))
    drain(scheduler)
    assert [sink.tokens for sink in sinks] == expected


def test_a_step_that_always_fails_elsewhere_gives_up_and_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, *_ = make()
    sink = ask(scheduler, "a", range(1, 300))
    scheduler.step()
    for _ in range(3):
        assert scheduler.busy
        scheduler.recover(RuntimeError("out of nowhere"))
    assert not scheduler.busy and isinstance(sink.final, Failed)
    after = ask(scheduler, "b", range(1, 300))
    drain(scheduler)
    assert after.done.reason == "stop"


@pytest.mark.parametrize("until", ["its end", "its prompt is cancelled", "its answer is cancelled", "its prompt fails"])
def test_what_was_lent_is_given_back_however_a_request_ends(until: str) -> None:
    class Noting(Lending):
        def restore(self, tokens: Any, plan: Any) -> Any:
            restored = super().restore(tokens, plan)
            out.append(id(restored.cache))
            return restored

        def take_back(self, cache: list[Any], *, valid: bool = True) -> None:
            out.remove(id(cache))

    out: list[int] = []
    store = Noting()
    runner = FakeRunner(answer=20, fail_on=POISON if until == "its prompt fails" else None)
    scheduler, *_ = make(runner, store=store, step=16)
    ask(scheduler, "a", [*range(1, 64), POISON, 7], max_tokens=30)
    for number in range(1000):
        (job,) = scheduler.requests
        has_begun = bool(job.generated) if until == "its answer is cancelled" else number > 0
        if until.endswith("cancelled") and has_begun:
            assert out, "it holds what it was lent"
            scheduler.cancel("a")
        scheduler.step()
        if not scheduler.busy:
            break
    assert not scheduler.busy and out == []


@pytest.mark.parametrize("error", [RuntimeError("of the device"), ValueError("of a program")])
def test_after_an_error_of_the_device_no_lent_kv_is_used_again(error: Exception) -> None:
    store = Lending()
    scheduler, *_ = make(FakeRunner(answer=20), store=store)
    ask(scheduler, "a", PROMPTS[0], max_tokens=30)
    steps_until(scheduler, lambda: scheduler.running)
    store.taken.clear()
    scheduler.recover(error)
    assert store.taken == [isinstance(error, ValueError)]
