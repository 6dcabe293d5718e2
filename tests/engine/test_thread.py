"""The model thread on a fake runtime: commands, states, overload, shutdown, a thread that hangs."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from start_llm.core.errors import ExitCode, QueueFull, TimedOut, Unavailable
from start_llm.core.events import EngineDone, Failed
from start_llm.core.prompt import Prompt
from start_llm.core.work import Submit
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import SharedMemory
from start_llm.engine.thread import EngineThread
from tests.engine.fakes import Collected, FakeDrawing, FakeRunner, FakeStore, scheduler_on, send, submit
from tests.together import together
from tests.waiting import until

WAIT = 60.0


class FakeRuntime:
    def __init__(self, runner: FakeRunner, store: FakeStore | None = None, shared: SharedMemory | None = None) -> None:
        self.closed_on: str | None = None
        guarded = GuardedStore(store or FakeStore(), list)  # type: ignore[arg-type]
        self.scheduler = scheduler_on(runner, guarded, 4, shared, draw=FakeDrawing, step=50)

    def unloading(self) -> Generator[float]:
        yield 0.0
        self.close()

    def close(self) -> None:
        self.closed_on = threading.current_thread().name


def ready_made(runtime: FakeRuntime) -> Generator[float, None, FakeRuntime]:
    """A load of one step."""
    yield 0.0
    return runtime


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[EngineThread, FakeRuntime]]]:
    threads: list[EngineThread] = []

    def begin(runner: FakeRunner | None = None, **options: Any) -> tuple[EngineThread, FakeRuntime]:
        runtime = FakeRuntime(runner or FakeRunner())
        engine = EngineThread(**{"max_queue": 3, "max_concurrency": 4, **options})
        threads.append(engine)
        engine.start()
        engine.load("", ready_made(runtime))
        return engine, runtime

    yield begin
    for engine in threads:
        engine.stop(WAIT)


def final(sink: Collected) -> EngineDone | Failed:
    while True:
        event = sink.queue.get(timeout=WAIT)
        if isinstance(event, EngineDone | Failed):
            return event


def test_runs_requests_from_many_threads(start: Any) -> None:
    engine, _ = start(max_queue=100)
    sinks = together(partial(send, engine, f"r{i}", range(1, 30 + i)) for i in range(20))
    assert [final(s).reason for s in sinks] == ["stop"] * 20  # type: ignore[union-attr]
    assert engine.status().state in {"ready", "busy"}


@pytest.mark.parametrize("error", [Unavailable("no such model"), SystemExit("no such model")])
def test_loading_that_fails_is_told(error: BaseException) -> None:
    def steps() -> Generator[float, None, Any]:
        yield 0.0
        assert engine.status().state == "loading"
        raise error

    engine = EngineThread(max_queue=1, max_concurrency=1)
    engine.start()
    with pytest.raises(type(error), match="no such model"):
        engine.load("", steps())
    work, _ = submit("a", [1, 2])
    for _ in range(2):
        assert engine.status().state == "failed"
        with pytest.raises(Unavailable, match="no such model"):
            engine.submit(work)
    assert engine.stop(WAIT)


def test_a_full_queue_refuses_with_retry_after(start: Any) -> None:
    engine, _ = start(FakeRunner(answer=10**9))
    for i in range(7):
        send(engine, f"r{i}", [1, 2, 3], max_tokens=10**9)
    work, _ = submit("one too many", [1, 2, 3])
    with pytest.raises(QueueFull) as error:
        engine.submit(work)
    assert error.value.retry_after is not None
    engine.cancel("r0")
    until(lambda: is_taken(engine, work), "a cancelled request does not make room")


def is_taken(engine: EngineThread, work: Submit) -> bool:
    with suppress(QueueFull):
        engine.submit(work)
        return True
    return False


def test_plan_answers_without_running(start: Any) -> None:
    engine, runtime = start()
    engine.cancel("nobody")
    report = engine.plan(Prompt(tuple(range(1, 50))))
    assert (report.prompt, report.reused, report.computed) == (49, 0, 49)
    assert runtime.scheduler.figures()["tokens_prefilled"] == 0
    assert isinstance(final(send(engine, "a", [1, 2, 3])), EngineDone), "to cancel an unknown request is no fault"


def test_stop_ends_running_work_and_closes_on_the_model_thread(start: Any) -> None:
    engine, runtime = start(FakeRunner(answer=10**9))
    sink = send(engine, "a", [1, 2, 3], max_tokens=10**9)
    engine.stop(WAIT)
    ended = final(sink)
    assert isinstance(ended, Failed)
    assert ended.error.status == 503
    assert runtime.closed_on == "model"
    with pytest.raises(Unavailable):
        send(engine, "b", [1, 2])


class Hanging(FakeRunner):
    """A prefill that does not come back until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def prefill(self, cache: list[Any], tokens: Any, images: Any = ()) -> int:
        self.release.wait(WAIT)
        return super().prefill(cache, tokens, images)


def test_a_model_thread_that_hangs_is_wedged_until_it_moves_again(start: Any) -> None:
    runner = Hanging()
    engine, _ = start(runner, watchdog=1.0)
    work, sink = submit("a", range(1, 50))
    began, when = time.monotonic(), time.time()
    engine.submit(work)
    ended = final(sink)
    assert 0.9 < time.monotonic() - began < 30
    assert isinstance(ended, Failed)
    assert ended.error.status == 504 and "GENERATION_WATCHDOG_SECONDS" in ended.error.message
    status = engine.status()
    assert status.state == "wedged" and "has not moved" in status.detail
    assert status.since is not None and abs(status.since - when) < 30
    with pytest.raises(Unavailable) as refused:
        send(engine, "b", [1, 2])
    assert refused.value.retry_after
    late = one_step()
    with pytest.raises(Unavailable, match="has not moved") as refused:
        engine.chore(late)
    assert refused.value.retry_after
    runner.release.set()
    until(lambda: engine.status().state == "ready")
    after = send(engine, "c", range(1, 50))
    assert isinstance(final(after), EngineDone)
    assert sink.final is ended  # it ended once
    assert engine.chore(one_step()) == "done"
    assert inspect.getgeneratorstate(late) == inspect.GEN_CREATED, "it was refused, so it is not done either"


def test_a_chore_that_hangs_is_not_waited_for_but_what_comes_in_or_goes_is(start: Any) -> None:
    """Given up, its steps would run later: a model in memory that nobody knows of."""
    engine, _ = start(FakeRunner(), watchdog=0.5)
    release, told = threading.Event(), list[str]()

    def hanging() -> Generator[float, None, None]:
        release.wait(WAIT)
        yield 0.0

    with pytest.raises(TimedOut, match=r"has not moved for 0\.5 s"):
        engine.chore(hanging())
    guest = threading.Thread(target=lambda: told.append(engine.guest(one_step())))
    guest.start()
    guest.join(1.0)
    assert guest.is_alive() and engine.status().state == "wedged"
    release.set()
    guest.join(WAIT)
    assert told == ["done"]
    until(lambda: engine.status().state == "ready")


def one_step() -> Generator[float, None, str]:
    yield 0.0
    return "done"


def test_after_twice_the_time_the_engine_is_lost(start: Any) -> None:
    lost: list[tuple[ExitCode, str]] = []
    runner = Hanging()
    engine, _ = start(runner, watchdog=0.5, on_lost=lambda code, why: lost.append((code, why)))
    began = time.monotonic()
    send(engine, "a", range(1, 50))
    until(lambda: bool(lost))
    assert 0.9 < time.monotonic() - began < 30
    assert lost[0][0] == ExitCode.WEDGED and "has not moved" in lost[0][1]
    time.sleep(0.3)
    assert len(lost) == 1
    runner.release.set()


def test_without_a_watchdog_a_request_takes_its_time(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.engine.thread.UNWATCHED_SECONDS", 0.3)
    lost: list[Any] = []
    runner = Hanging()
    engine, _ = start(runner, watchdog=0, on_lost=lambda code, why: lost.append(code))
    sink = send(engine, "a", range(1, 50))
    until(lambda: engine.status().state == "wedged")
    time.sleep(0.5)
    second = send(engine, "b", range(1, 50))
    assert not lost and sink.final is None
    runner.release.set()
    assert isinstance(final(sink), EngineDone) and isinstance(final(second), EngineDone)


def test_a_wedged_thread_is_not_waited_for(start: Any) -> None:
    runner = Hanging()
    engine, _ = start(runner, watchdog=0.4)
    send(engine, "a", range(1, 50))
    until(lambda: engine.status().state == "wedged")
    began = time.monotonic()
    assert engine.stop(patience=60.0) is False
    assert time.monotonic() - began < 30  # who is waited for has 60 s
    runner.release.set()
    until(lambda: engine.status().state == "stopped")
    assert engine.stop() is True


def test_loading_is_not_waited_for() -> None:
    release = threading.Event()

    def steps() -> Generator[float, None, Any]:
        reached.set()
        release.wait(WAIT)
        yield 0.0
        raise Unavailable("too late")

    reached = threading.Event()
    engine = EngineThread(max_queue=1, max_concurrency=1)
    engine.start()
    loader = threading.Thread(target=refused_load, args=(engine, steps()))
    loader.start()
    assert reached.wait(WAIT)
    began = time.monotonic()
    assert engine.stop(patience=60.0) is False
    assert time.monotonic() - began < 30  # who is waited for has 60 s
    release.set()
    loader.join(WAIT)


def refused_load(engine: EngineThread, steps: Generator[float, None, Any]) -> None:
    with pytest.raises(Unavailable):
        engine.load("", steps)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")])
def test_a_model_thread_that_dies_says_so_and_leaves_nobody_waiting(start: Any, error: BaseException) -> None:
    class Dying(FakeRunner):
        def decode(self) -> Any:
            raise error

    lost: list[tuple[ExitCode, str]] = []
    engine, runtime = start(Dying(), on_lost=lambda code, why: lost.append((code, why)))
    sink = send(engine, "a", [1, 2, 3])
    second = send(engine, "b", [1, 2, 3])
    for one in (sink, second):
        ended = final(one)
        assert isinstance(ended, Failed) and ended.error.status == 500
        assert type(error).__name__ in ended.error.message
    until(lambda: bool(lost))
    assert lost[0][0] == ExitCode.ENGINE_DIED
    assert engine.status().state == "failed" and "died" in engine.status().detail
    with pytest.raises(Unavailable, match="died"):
        send(engine, "c", [1, 2])
    until(lambda: runtime.closed_on == "model")


@pytest.mark.parametrize("tokens", [(2**40, 1), ("a", "b")])
def test_a_prompt_that_is_none_ends_that_request_and_not_the_thread(start: Any, tokens: Any) -> None:
    engine, _ = start()
    sink = send(engine, "a", tokens)
    assert isinstance(final(sink), Failed)
    engine.prefill_idle(Prompt(tokens), "s")
    after = send(engine, "b", [1, 2, 3])
    assert isinstance(final(after), EngineDone)
