"""Several models on the model thread: whose step is next, loading and unloading between the steps of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotFound, Unavailable
from start_llm.core.events import EngineDone, Failed
from start_llm.core.prompt import Prompt
from start_llm.engine.loop import STUCK_SECONDS, Chores, LoadedModels
from start_llm.engine.thread import EngineThread
from tests.clock import Clock
from tests.engine.fakes import FakeRunner, FakeStore, FixedMemory, send
from tests.engine.test_thread import WAIT, FakeRuntime, final, ready_made
from tests.waiting import until

PROMPT = Prompt((1, 2, 3))


class Worker:
    """Stands for a scheduler whose steps take `cost` seconds."""

    def __init__(self, clock: Clock, cost: float) -> None:
        self._clock, self.cost = clock, cost
        self.busy, self.crowded = True, False
        self.running = 1
        self.requests = ["one"]
        self.steps = self.paused = 0
        self.idle_prefill = SimpleNamespace(began=True)

    def pause_idle(self) -> None:
        self.paused += 1
        self.idle_prefill.began = False

    def step(self) -> None:
        self.steps += 1
        self._clock.now += self.cost

    def figures(self) -> dict[str, float]:
        return {"tokens_decoded": self.steps, "kv_bytes": 10}


def models_of(*costs: float) -> tuple[Clock, LoadedModels, list[Worker]]:
    """``0``, ``1`` and so on, whose steps take so many seconds."""
    clock = Clock()
    models, workers = LoadedModels(clock), [Worker(clock, cost) for cost in costs]
    for number, worker in enumerate(workers):
        models.add(str(number), SimpleNamespace(scheduler=worker))  # type: ignore[arg-type]
    return clock, models, workers


def work(models: LoadedModels, steps: int) -> None:
    for _ in range(steps):
        model = models.next()
        assert model is not None
        models.step(model)


def test_two_models_get_the_same_time_whatever_their_steps_take() -> None:
    _, models, (slow, quick) = models_of(0.5, 0.01)
    work(models, 520)
    assert abs(slow.steps * slow.cost - quick.steps * quick.cost) <= slow.cost
    assert slow.crowded and quick.crowded


def test_a_model_that_comes_back_has_no_claim_on_what_it_left_to_others() -> None:
    _, models, (one, two) = models_of(0.1, 0.1)
    two.busy = False
    work(models, 1000)
    assert not one.crowded
    two.busy, before = True, one.steps
    work(models, 20)
    assert abs((one.steps - before) - two.steps) <= 1


def test_the_idle_prefill_of_a_model_gives_way_to_the_work_of_others() -> None:
    _, models, (busy, idle) = models_of(0.1, 0.1)
    idle.busy = False
    work(models, 3)
    assert idle.paused == 1 and busy.paused == 0


def test_a_model_that_waits_for_memory_does_not_take_the_time_of_the_others() -> None:
    _, models, (one, waiting) = models_of(0.1, 0.00001)
    waiting.running = 0
    work(models, 40)
    assert one.steps >= 19 and waiting.steps >= 19


def test_all_wait_for_memory_only_if_none_got_on_and_until_something_happens() -> None:
    _, models, (one, two) = models_of(0.1, 0.1)
    work(models, 2)
    assert not models.stuck
    one.running = 0
    work(models, 2)
    assert not models.stuck
    two.running = 0
    work(models, 2)
    assert models.stuck and one.steps == two.steps == 3
    two.busy = False
    assert models.stuck
    models.look_again()
    assert not models.stuck
    one.busy = False
    assert not models.stuck, "there is nothing that could wait"


def test_a_step_that_fails_may_have_made_room_and_its_time_counts() -> None:
    class Broken(Worker):
        recovered = 0

        def step(self) -> None:
            super().step()
            self.running = 0
            raise ValueError("broken")

        def recover(self, error: Exception) -> None:
            self.recovered += str(error) == "broken"

    clock, models, _ = models_of()
    broken, one = Broken(clock, 0.1), Worker(clock, 0.01)
    for worker in (broken, one):
        worker.running = 0
        models.add(str(worker.cost), SimpleNamespace(scheduler=worker))  # type: ignore[arg-type]
    work(models, 2)
    assert [model.blocked for model in models] == [False, True]
    work(models, 1)
    assert [model.blocked for model in models] == [False, False]
    assert [model.seconds for model in models] == pytest.approx([0.2, 0.01])
    assert broken.recovered == broken.steps == 2 and one.steps == 1


def test_what_a_model_counted_outlives_it_and_its_sizes_do_not() -> None:
    _, models, _ = models_of(1.0, 1.0)
    work(models, 10)
    assert models.figures() == {"tokens_decoded": 10, "kv_bytes": 20, "memory_pressure": 0}
    assert models.remove("1") is not None and models.remove("1") is None
    assert models.figures() == {"tokens_decoded": 10, "kv_bytes": 10, "memory_pressure": 0}
    assert models.get("1") is None


def test_chores_take_turns_and_wait_as_they_ask() -> None:
    clock, told, seen = Clock(), [], []

    def chore(name: str, pause: float) -> Generator[float, None, str]:
        for part in range(3):
            seen.append(f"{name}{part}")
            yield pause
        return name

    chores = Chores(clock)
    chores.add(chore("slow", 5.0), told.append)
    chores.add(chore("quick", 0.0), told.append)
    assert chores.wait == 0.0
    for _ in range(5):
        chores.step()
    assert seen == ["slow0", "quick0", "quick1", "quick2"] and told == ["quick"] and chores.wait == 5.0
    chores.step()
    assert len(seen) == 4
    for _ in range(3):
        clock.now += 5.0
        chores.step()
    assert seen[4:] == ["slow1", "slow2"] and told == ["quick", "slow"] and len(chores) == 0


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    runner = FakeRunner(answer=10**9)
    made = EngineThread(max_queue=8, max_concurrency=4)
    made.start()
    made.load("", ready_made(FakeRuntime(runner)))
    yield made
    made.stop(WAIT)


def steps(runtime: FakeRuntime, before: Callable[[], Any] = lambda: None) -> Generator[float, None, Any]:
    for _ in range(3):
        before()
        yield 0.0
    return runtime


def test_a_model_is_loaded_and_answers_while_another_one_decodes(engine: EngineThread) -> None:
    sink = send(engine, "a", [1, 2, 3], max_tokens=10**9)
    until(lambda: len(sink.tokens) > 3)
    seen: list[int] = []
    engine.load("other", steps(FakeRuntime(FakeRunner()), lambda: seen.append(len(sink.tokens))))
    assert seen[0] < seen[1] < seen[2], "each step of the loading had steps of the first model between"
    assert isinstance(final(send(engine, "b", [1, 2, 3], model="other")), EngineDone)
    assert sink.final is None and engine.status().running == 1
    engine.cancel("a")
    assert isinstance(final(sink), EngineDone)


def test_a_load_that_fails_is_told_to_who_asked_and_ends_nothing(engine: EngineThread) -> None:
    sink = send(engine, "a", [1, 2, 3], max_tokens=10**9)

    def fail() -> None:
        raise NotFound("there are no weights")

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(NotFound, match="no weights"):
        engine.load("other", steps(FakeRuntime(FakeRunner()), fail))
    with pytest.raises(SystemExit):
        engine.load("other", steps(FakeRuntime(FakeRunner()), leave))
    assert sink.final is None and engine.status().state == "busy"


def test_a_request_for_a_model_that_is_not_loaded_fails_and_the_thread_goes_on(engine: EngineThread) -> None:
    ended = final(send(engine, "a", [1, 2, 3], model="nobody"))
    assert isinstance(ended, Failed) and ended.error.status == 503 and "'nobody'" in ended.error.message
    with pytest.raises(Unavailable, match="nobody"):
        engine.plan(PROMPT, "nobody")
    with pytest.raises(Unavailable, match="nobody"):
        engine.call(lambda scheduler: scheduler.running, model="nobody")
    engine.prefill_idle(PROMPT, None, model="nobody")
    assert engine.call(lambda scheduler: scheduler.running) == 0


def test_unloading_ends_what_runs_and_frees_the_model_on_its_thread(engine: EngineThread) -> None:
    runtime = FakeRuntime(FakeRunner(answer=10**9))
    engine.load("other", steps(runtime))
    sink = send(engine, "a", [1, 2, 3], max_tokens=10**9, model="other")
    until(lambda: len(sink.tokens) > 3)
    engine.unload("other")
    ended = final(sink)
    assert isinstance(ended, Failed) and ended.error.status == 503
    assert runtime.closed_on == "model"
    engine.unload("other")
    engine.unload("")
    assert engine.status().state == "ready", "a thread without any model is there for the next one"
    with pytest.raises(Unavailable):
        engine.plan(PROMPT)


def test_the_end_of_the_thread_is_told_to_who_waits_for_a_load(engine: EngineThread) -> None:
    begun, errors = threading.Event(), []

    def for_ever() -> Generator[float, None, Any]:
        while True:
            begun.set()
            yield 0.01

    def load() -> None:
        try:
            engine.load("other", for_ever())
        except Unavailable as error:
            errors.append(error)

    asking = threading.Thread(target=load)
    asking.start()
    assert begun.wait(WAIT)
    assert engine.stop(WAIT)
    asking.join(WAIT)
    assert len(errors) == 1 and "shutting down" in errors[0].message


def test_the_thread_rests_while_all_requests_wait_for_memory(engine: EngineThread) -> None:
    promise = Mock(return_value=True)
    shared = FixedMemory(1_000, 0, promise)  # too little for any request; more is promised, and comes in the end
    engine.load("other", steps(FakeRuntime(FakeRunner(), FakeStore(token_bytes=100), shared)))
    began = time.monotonic()
    sink = send(engine, "a", [1, 2, 3], model="other")
    until(lambda: promise.call_count >= 8)
    looks, seconds = promise.call_count, time.monotonic() - began
    assert looks <= 3 + 2 * seconds / STUCK_SECONDS, f"it looked {looks} times in {seconds:.1f} s"
    assert engine.status().state == "busy" and sink.final is None
    gone = send(engine, "b", [1, 2, 3], model="other")
    engine.cancel("b")
    assert isinstance(final(gone), EngineDone), "it notices what is told to it"
    other = send(engine, "c", [1, 2, 3])
    until(lambda: len(other.tokens) > 3)  # it does not stand in the way of other models
    engine.cancel("c")
    shared.fixed = 10**6
    assert isinstance(final(sink), EngineDone) and len(sink.tokens) == 3
