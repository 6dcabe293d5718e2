"""The scheduler on a fake model: order of work, sharing, cancelling, storing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.errors import Unavailable
from start_llm.core.events import Failed, Progress
from start_llm.core.work import Submit
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.kvcache.types import RestorePlan, StoredEnd
from tests.engine.fakes import (
    EOS,
    FakeDrawing,
    FakeRunner,
    FakeStore,
    FixedMemory,
    Restored,
    ask,
    scheduler_on,
    steps,
    steps_until,
    submit,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make(
    runner: FakeRunner | None = None,
    store: FakeStore | None = None,
    memory: int = 0,
    reuse: bool = True,
    draw: Any = FakeDrawing,
    **limits: Any,
) -> Any:
    runner, store, clock = runner or FakeRunner(), store or FakeStore(), Clock()
    guarded = GuardedStore(store, list, reuse=reuse)  # type: ignore[arg-type]
    limits = {"step": 100, "idle_step": 10, **limits}
    scheduler = scheduler_on(runner, guarded, 8, FixedMemory(memory, memory), clock=clock, draw=draw, **limits)
    return scheduler, runner, store, clock


def drain(scheduler: Scheduler, most: int = 1000) -> None:
    steps_until(scheduler, lambda: not scheduler.busy, most)


def idle(scheduler: Scheduler) -> None:
    while scheduler.idle_prefill.waiting:
        scheduler.step_idle()


def pass_time(scheduler: Scheduler, clock: Clock, seconds: float) -> None:
    """In steps, as no single one is believed to take long."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(until, clock.now + 0.1)
        scheduler.step()


def test_a_request_is_prefilled_decoded_and_stored() -> None:
    runner, work_before_drafts = FakeRunner(), list[int]()

    def draw(work: Submit, generated: Sequence[int]) -> FakeDrawing:
        work_before_drafts.append(runner.work)
        return FakeDrawing(work, generated)

    scheduler, _, store, _ = make(runner, draw=draw)
    sink = ask(scheduler, "a", range(1, 251))
    drain(scheduler)
    assert work_before_drafts == [0]
    assert sink.done.reason == "stop"
    assert len(sink.tokens) == 3
    assert sink.done.tokens == (*sink.tokens, EOS)
    assert [n for _, n in runner.prefilled] == [100, 100, 49]
    assert [e.done for e in sink.events if isinstance(e, Progress)] == [101, 201, 250]
    assert len(store.entries[-1]) == 254
    assert sink.done.report.computed == 250
    assert sink.done.report.generated == 4


def test_a_turn_is_over_once_and_a_guess_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _, store, _ = make()
    answered: list[bool] = []
    monkeypatch.setattr(store, "put", lambda tokens, cache, about: answered.append(about.answered))
    ask(scheduler, "a", range(1, 251))
    drain(scheduler)
    assert answered == [False, True]  # the prompt; the answer
    scheduler.add_idle(submit("guess", range(1, 301))[0])
    idle(scheduler)
    assert answered[2:] == [False]


def test_the_next_turn_computes_what_is_new() -> None:
    scheduler, runner, _, _ = make()
    sink = ask(scheduler, "a", range(1, 251))
    drain(scheduler)
    history = [*range(1, 251), *sink.done.tokens, 7, 8, 9]
    before = runner.work
    again = ask(scheduler, "b", history)
    drain(scheduler)
    assert runner.work - before == 2  # 7 and 8; the 9 is fed by the first decode step
    assert (again.done.report.reused, again.done.report.computed) == (254, 3)
    assert again.done.report.new == 3


def test_a_request_that_is_cancelled_reports_what_was_computed_and_that_is_kept() -> None:
    scheduler, runner, _, _ = make(store=FakeStore(cuttable=False))
    sink = ask(scheduler, "a", range(1, 1001))
    steps(scheduler, 4)
    scheduler.requests.cancel("a")
    drain(scheduler)
    done = sink.done
    assert (done.reason, done.report.prompt, done.report.computed) == ("cancelled", 1000, 400) and runner.work == 400
    assert [e.computed for e in sink.events if isinstance(e, Progress)] == [100, 200, 300, 400]
    never = ask(scheduler, "b", range(2001, 2050))
    scheduler.requests.cancel("b")
    drain(scheduler)
    assert (never.done.report.prompt, never.done.report.computed) == (49, 0)
    ask(scheduler, "c", range(1, 1001))
    drain(scheduler)
    assert runner.work == 999


def test_a_request_that_fails_reports_what_was_computed_and_leaves_the_others_alone() -> None:
    scheduler, *_ = make(FakeRunner(fail_on=666))
    bad, good = ask(scheduler, "bad", [*range(1, 250), 666, *range(250, 300)]), ask(scheduler, "good", range(2, 300))
    drain(scheduler)
    assert isinstance(bad.final, Failed) and bad.final.error.status == 500
    assert bad.final.report is not None and bad.final.report.computed == 200
    assert good.done.reason == "stop"


@pytest.mark.parametrize(("owner", "joined"), [(None, 499), ("another", 0)])
def test_two_identical_requests_compute_the_prompt_once(owner: str | None, joined: int) -> None:
    """That another owner's prompt is running now is told to nobody."""
    scheduler, runner, _, _ = make()
    sinks = [ask(scheduler, name, range(1, 501), owner=whose) for name, whose in (("a", None), ("b", owner))]
    drain(scheduler)
    assert runner.work == 499
    assert sinks[0].tokens == sinks[1].tokens
    assert sinks[1].done.report.joined == joined


@pytest.mark.parametrize("cuttable", [True, False])
@pytest.mark.parametrize("shared", [400, 433])  # 433 is inside of a chunk: the leader must pause there
def test_a_shared_uncomputed_prefix_is_computed_once(cuttable: bool, shared: int) -> None:
    scheduler, runner, _, _ = make(store=FakeStore(cuttable))
    for i in range(4):
        ask(scheduler, f"r{i}", [*range(1, shared + 1), *range(1000 + i * 50, 1050 + i * 50)])
    drain(scheduler)
    assert runner.work == shared + 4 * 49


def test_the_store_is_told_whether_an_answer_calls_tools() -> None:
    told = []
    for mark in (None, (sum(range(1, 51))) % 97 + 1, 98):  # not known; the answer's first token; one that is never made
        scheduler, _, store, _ = make(FakeRunner(call_mark=mark))
        sink = ask(scheduler, "a", range(1, 51))
        drain(scheduler)
        assert sink.done.reason == "stop"
        told.append(store.calls[-1])
    assert told == [None, True, False]


class Forgetful(FakeStore):
    """Restores less than it planned, and after `forget` takes nothing in."""

    gives = 10**6
    deaf = False

    def restore(self, tokens: Any, plan: RestorePlan) -> Restored:
        return super().restore(tokens, replace(plan, length=min(plan.length, self.gives)))

    def put(self, tokens: Any, cache: list[Any], about: StoredEnd) -> None:
        if not self.deaf:
            super().put(tokens, cache, about)

    def forget(self) -> None:
        self.entries, self.deaf = [], True


@pytest.mark.parametrize("reused", [10, 0])
def test_what_is_said_to_be_joined_was_really_reused(reused: int) -> None:
    """The store gives less than it had, or has lost all."""
    store = Forgetful()
    scheduler, *_ = make(store=store)
    store.put(range(1, 101), list(range(1, 101)), StoredEnd())
    ask(scheduler, "a", range(1, 501))
    sink = ask(scheduler, "b", range(1, 501))
    scheduler.step()
    if reused:
        store.gives = reused
    else:
        store.forget()
    drain(scheduler)
    assert (sink.done.report.reused, sink.done.report.joined) == (reused, reused)


def test_where_all_is_ended_prompts_keep_what_was_computed() -> None:
    """The server ends, or the model is unloaded: who comes again pays for the rest only."""
    scheduler, runner, store, _ = make()
    sink = ask(scheduler, "a", range(1, 501))
    ask(scheduler, "b", range(600, 1100))
    steps_until(scheduler, lambda: runner.work >= 300)
    scheduler.fail_all(Unavailable("The server is shutting down."))
    assert isinstance(sink.final, Failed) and sink.final.error.status == 503 and not scheduler.busy
    assert sum(map(len, store.entries)) == runner.work


def test_a_report_says_that_stored_kv_could_not_be_read() -> None:
    told = []
    for gives in (10**6, 10):
        store = Forgetful()
        store.gives = gives
        store.put(range(1, 101), list(range(1, 101)), StoredEnd())
        scheduler, *_ = make(store=store)
        sink = ask(scheduler, "a", range(1, 101))
        drain(scheduler)
        miss = sink.done.report.miss
        told.append((sink.done.report.reused, miss.reason, miss.token))
    assert told[1] == (10, "store_error", 10) and told[0][1] != "store_error"


def test_the_end_of_a_system_block_is_marked() -> None:
    store = FakeStore(cuttable=False)
    scheduler, *_ = make(store=store)
    ask(scheduler, "a", range(1, 301), boundaries=(50, 200), system_end=50)
    drain(scheduler)
    assert [len(entry) for entry, head in zip(store.entries, store.heads, strict=True) if head] == [50]


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    scheduler, runner, _, _ = make()
    first = ask(scheduler, "a", range(1, 501))
    second = ask(scheduler, "b", range(1, 501))
    scheduler.step()
    scheduler.step()
    scheduler.requests.cancel("a")
    drain(scheduler)
    assert first.done.reason == "cancelled"
    assert second.done.reason == "stop"
    assert runner.work == 499


def test_cancel_while_decoding_keeps_the_kv_and_ends_once() -> None:
    scheduler, runner, store, _ = make(runner=FakeRunner(answer=1000))
    sink = ask(scheduler, "a", range(1, 60), max_tokens=5000)
    steps(scheduler, 20)
    scheduler.requests.cancel("a")
    drain(scheduler)
    assert sink.done.reason == "cancelled"
    assert len(store.entries[-1]) == 59 + len(sink.tokens)
    assert runner.rows == {}


def test_the_watchdog_does_not_count_time_in_which_the_process_was_stopped() -> None:
    scheduler, _, _, clock = make(runner=FakeRunner(max_rows=1, answer=300), deadline=5.0)
    sink = ask(scheduler, "first", range(1, 60), max_tokens=500)
    waiting = ask(scheduler, "second", range(5000, 7000), max_tokens=500)
    for number in range(90):
        clock.now += 3600.0 if number in (0, 1, 15, 60, 61) else 0.0  # in the queue, in prefill, in an answer
        scheduler.step()
    assert sink.final is None and waiting.final is None
    drain(scheduler)
    assert (sink.done.reason, waiting.done.reason) == ("stop", "stop")


def test_the_watchdog_does_not_count_the_queue_nor_a_prompt_that_makes_progress() -> None:
    scheduler, _, _, clock = make(runner=FakeRunner(max_rows=1, answer=12), deadline=5.0)
    sink = ask(scheduler, "first", range(1, 2001), max_tokens=50)
    waiting = ask(scheduler, "second", range(5000, 7000), max_tokens=50)
    while scheduler.busy:
        scheduler.step()
        decodes = waiting.tokens if sink.final else sink.tokens
        clock.now += 0.2 if decodes else 1.5
    assert (sink.done.reason, waiting.done.reason) == ("stop", "stop")
    assert clock.now > 100 + 2 * 20 * 1.5


def test_the_watchdog_ends_a_request_at_its_deadline_and_counts_what_it_decoded_before_it_was_put_back() -> None:
    scheduler, _, _, clock = make(runner=FakeRunner(answer=10_000), deadline=5.0)
    sink = ask(scheduler, "a", range(1, 60), max_tokens=100_000)
    steps(scheduler, 5)
    pass_time(scheduler, clock, 3)
    scheduler.recover(RuntimeError("an interruption"))
    clock.now += 100  # it waits
    steps(scheduler, 5)
    pass_time(scheduler, clock, 1.9)
    assert sink.final is None
    pass_time(scheduler, clock, 0.2)
    assert sink.done.reason == "deadline"


def test_no_more_run_than_there_is_room_for() -> None:
    scheduler, runner, _, _ = make(runner=FakeRunner(max_rows=2, answer=20))
    sinks = [ask(scheduler, f"r{i}", range(i * 100 + 1, i * 100 + 30), max_tokens=50) for i in range(6)]
    drain(scheduler)
    assert runner.widest == 2
    assert all(s.done.reason == "stop" for s in sinks)


def test_reanchoring_runs_when_idle_and_is_reused() -> None:
    scheduler, runner, _, _ = make()
    scheduler.idle_prefill.begin(submit("anchor", range(1, 101))[0])
    idle(scheduler)
    assert [n for _, n in runner.prefilled] == [10] * 10
    for owner, told in ((None, 100), ("another", 0)):  # what was computed for an owner is told to nobody else
        sink = ask(scheduler, "a", [*range(1, 101), 500, 501], owner=owner)
        drain(scheduler)
        assert sink.done.report.reused >= 100
        assert sink.done.report.computed_idle == told
    assert scheduler.idle_prefill.tokens == 100


def test_reanchoring_yields_to_a_request_and_keeps_its_part() -> None:
    scheduler, _, _, _ = make()
    scheduler.idle_prefill.begin(submit("anchor", range(1, 101))[0])
    steps(scheduler.idle_prefill, 3)
    sink = ask(scheduler, "a", [*range(1, 101), 500, 501])
    drain(scheduler)
    assert not scheduler.idle_prefill.waiting
    assert sink.done.report.reused == 30


def test_reanchoring_gives_way_to_another_model_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, runner, store, _ = make()
    returned: list[Any] = []
    monkeypatch.setattr(store, "take_back", lambda cache, **about: returned.append(cache))
    scheduler.idle_prefill.give_way()
    scheduler.idle_prefill.begin(submit("anchor", range(1, 101))[0])
    steps(scheduler.idle_prefill, 3)
    assert not returned
    scheduler.idle_prefill.give_way()
    scheduler.idle_prefill.give_way()
    assert len(returned) == 1 and scheduler.idle_prefill.waiting
    idle(scheduler)
    assert runner.work == 100 and len(returned) == 2


def test_reanchoring_never_evicts() -> None:
    scheduler, runner, _, _ = make(store=FakeStore(room=False))
    scheduler.idle_prefill.begin(submit("anchor", range(1, 101))[0])
    idle(scheduler)
    assert runner.work == 0


GIB = 2**30


def test_requests_wait_for_memory_and_the_store_makes_room() -> None:
    store = FakeStore(token_bytes=2**20)
    scheduler, runner, _, _ = make(runner=FakeRunner(answer=5), store=store, memory=1 * GIB)
    sinks = [ask(scheduler, f"r{i}", range(1000 * i + 1, 1000 * i + 401), max_tokens=20) for i in range(4)]
    drain(scheduler)
    assert [sink.done.reason for sink in sinks] == ["stop"] * 4
    assert runner.widest == 2
    assert min(store.budgets) == GIB - 2 * 420 * 2**20
    assert store.budgets[-1] == GIB


@pytest.mark.parametrize("waits", ["another prompt", "another model"])
def test_prefill_steps_follow_what_they_take_and_who_waits(waits: str) -> None:
    class Slow(FakeRunner):
        """A token takes a millisecond."""

        def prefill(self, cache: list[Any], tokens: Any, images: Any = ()) -> int:
            clock.now += len(tokens) / 1000
            return super().prefill(cache, tokens, images)

    scheduler, runner, _, clock = make(runner=Slow(), step=None)
    ask(scheduler, "alone", range(1, 12_001))
    for _ in range(3):
        scheduler.step()
    if waits == "another prompt":
        ask(scheduler, "other", range(50_001, 53_001))
    scheduler.crowded = waits == "another model"
    for _ in range(3):
        scheduler.step()
    assert [size for _, size in runner.prefilled] == [512, 1024, 1984, 496, 496, 496]  # two seconds, then half of one


def test_prefill_steps_keep_within_memory() -> None:
    scheduler, runner, _, _ = make(runner=FakeRunner(token_bytes=2**20), step=None, step_bytes=300 * 2**20)
    ask(scheduler, "a", range(1, 3001))
    drain(scheduler)
    assert runner.prefilled[0][1] == 512  # nobody knew
    assert max(size for _, size in runner.prefilled[1:]) <= 300
