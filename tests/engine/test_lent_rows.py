"""Requests that take over what is stored, in random orders, with forks, cancels and faults in between."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from start_llm.core.events import Failed
from start_llm.engine.decode import layerwise
from start_llm.engine.schedule.jobs import Job
from start_llm.kvcache import layers
from start_llm.kvcache.kinds import leaves
from start_llm.kvcache.layers import eval_and_free
from start_llm.kvcache.tree import Segment
from tests.engine.served import SYSTEM, Message, Server
from tests.kvcache.test_rows import check
from tests.oracle import Oracle, build_oracle

KINDS: tuple[Any, ...] = ("plain", "hybrid", "windowed")
TOKEN_BYTES = 16
MANY = 1 << 30
COPIES = (layers, layerwise)  # they call `eval_and_free`


@cache
def oracle(kind: Any) -> Oracle:
    with TemporaryDirectory() as folder:
        return Oracle.load(build_oracle(Path(folder) / kind, kind))


def rows_of(segment: Segment) -> tuple[list[int], list[int]]:
    """The keys and values that the oracle has written."""
    return (segment.tokens + 1).tolist(), list(range(segment.start, segment.end))


class Fault(Exception):
    """Of a program."""


class Failing(Server):
    """Every call below the store can fail: those of the layer kit, the passes of the model, and each copy of KV that
    moves, joins or grows. After each step every stored segment is compared with its own tokens.
    """

    METHODS = (
        *("slice", "checkpoint", "part", "parts", "build", "adopt", "take_buffers", "make_room", "buffers"),
        *("packed", "packed_rows"),
    )

    def __init__(self, kind: Any, stored: int = MANY, running: int = 0, **more: Any) -> None:
        super().__init__(oracle(kind), stored, running, **more)
        self.calls = 0
        self.fail_at: int | None = None  # a call
        self.error: Callable[[], Exception] = Fault
        for name in self.METHODS:
            setattr(self.kit, name, self._wrapped(getattr(self.kit, name)))
        for module in COPIES:
            setattr(module, eval_and_free.__name__, self._wrapped(eval_and_free))

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._fails():
                raise self.error()
            return method(*args, **kwargs)

        return call

    def _fails(self) -> bool:
        self.calls += 1
        fails = self.calls == self.fail_at
        self.faults += fails
        return fails

    def model(self, inputs: Any, cache: Any) -> Any:
        """After an error of the device the rows of the pass hold anything."""
        if not self._fails():
            return super().model(inputs, cache)
        error = self.error()
        if isinstance(error, RuntimeError):
            for leaf in leaves(cache):
                if isinstance(leaf, KVCache | BatchKVCache) and leaf.keys is not None:
                    leaf.keys, leaf.values = mx.zeros_like(leaf.keys), mx.zeros_like(leaf.values)
        raise error

    def step(self) -> None:
        super().step()
        armed, self.fail_at = self.fail_at, None
        calls = self.calls
        jobs: list[Job] = [*self.scheduler.requests]
        if (idle := self.scheduler.idle_prefill._job) is not None:
            jobs.append(idle)
        lent = {id(job.lent) for job in jobs if job.lent is not None}
        assert set(self.store.lent_rows._rows) <= lent, "KV of the tree is lent to nobody"
        check(self.store, running=len(self.store.lent_rows._rows), expected=rows_of)
        self.calls, self.fail_at = calls, armed


class Interleaving:
    """Requests that begin, fork, are cancelled and preempted in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        stored, running = (self.random.choice([MANY, n * TOKEN_BYTES]) for n in (150, 500))
        running, arrays = 0 if running == MANY else running, (0, 12, 30, 20)[seed % 4]
        self.server = Failing(KINDS[seed % 3], stored, running, drafts=seed % 2 == 0, arrays=arrays)
        self.faults = seed % 5 > 1

    def history(self) -> list[Message]:
        """Of an earlier conversation: all of it, or its beginning."""
        ended = [r for r in self.server.requests if r.sink.final is not None and not isinstance(r.sink.final, Failed)]
        if not ended or self.random.random() < 0.2:
            return [SYSTEM]
        request = self.random.choice(ended[-4:])
        if self.random.random() < 0.3:
            return request.messages[: self.random.randrange(1, len(request.messages), 2)]
        return self.server.told(request)

    def begin(self) -> None:
        words = " ".join(self.random.choice(("one", "two", "three")) for _ in range(self.random.randint(1, 25)))
        self.server.ask(self.history(), words, self.random.choice([1, 3, 12]))

    def cancel(self) -> None:
        self.server.scheduler.requests.cancel(self.random.choice(self.server.requests).name)

    def idle(self) -> None:
        self.server.guess([*self.history(), {"role": "user", "content": "a guess"}])

    def squeeze(self) -> None:
        self.server.store.set_budget(self.random.choice([MANY, 100 * TOKEN_BYTES]))

    def play(self, turns: int) -> None:
        server = self.server
        for _ in range(turns):
            if self.faults and self.random.random() < 0.3:
                server.fail_at = server.calls + self.random.randint(1, 40)
                server.error = self.random.choice([Fault, RuntimeError])
            running = sum(r.sink.final is None for r in server.requests)
            kinds = [self.idle, server.scheduler.idle_prefill.give_way, self.squeeze]
            kinds += [self.begin] * 4 if running < 3 else []
            kinds += [self.cancel] if running else []
            try:
                self.random.choice(kinds)()
            except (Fault, RuntimeError):
                assert server.fail_at == server.calls
            for _ in range(self.random.randint(1, 12)):
                server.step()
        server.fail_at = None
        server.finish()
        server.failed()
        server.close()


@pytest.fixture(autouse=True)
def nothing_leaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("CRITICAL")  # what is logged holds tracebacks, and so rows
    for kind in KINDS:
        oracle(kind)
    before = held_bytes()
    yield
    for module in COPIES:
        setattr(module, eval_and_free.__name__, eval_and_free)
    assert held_bytes() - before < 4096


def held_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_idle_work_that_ends_keeps_what_it_took_over_and_what_it_computed() -> None:
    server = Failing("plain")
    first = server.ask([SYSTEM], "one", 3)
    server.finish()
    history, idle = server.told(first), server.scheduler.idle_prefill
    tokens = server.guess([*history, {"role": "user", "content": "three " * 40}])
    while idle._job is None or idle._job.is_new:
        server.step()
    reached = idle._job.prefill.position
    assert len(first.tokens) < reached < len(tokens) and idle._job.lent is not None
    second = server.ask(history, "three " * 40, 3)
    server.finish()
    assert server.failed() == []
    assert second.sink.done.report.reused >= reached
    server.close()


@pytest.mark.thorough
def test_requests_in_any_order_are_answered_by_what_they_said_and_lose_no_byte() -> None:
    for seed in range(30):
        Interleaving(seed).play(12)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_orders_on_the_oracle(part: int) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        Interleaving(seed).play(12)


def life(server: Failing, cancelled: str = "", at: int = -1) -> None:
    """Two turns, and a fork that reads the first while the second has taken it over. A request is cancelled in front of
    step `at`, which counts from the beginning of the second turn."""
    first = server.ask([SYSTEM], "one two three " * 3, 3)
    server.finish()
    history = server.told(first)
    server.ask(history, "two " * 60, 12)  # of several chunks, so that some steps end within its prompt
    for step in range(5_000):
        if step == 3:
            server.ask([SYSTEM], "one two " * 20, 8)
        if step == 6:
            server.ask(history, "three", 2)
        if step == at:
            server.scheduler.requests.cancel(cancelled)
        if not server.scheduler.busy:
            break
        server.step()
    server.ask(history, "two", 3)
    server.finish()
    server.failed()
    server.close()


def places(few: int, parts: int) -> pytest.MarkDecorator:
    """Every `few`-th place; with `--slow` all, in so many parts."""
    slow = [pytest.param(first, parts, marks=pytest.mark.slow) for first in range(parts)]
    return pytest.mark.parametrize(("first", "every"), [(0, few), *slow])


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@places(few=13, parts=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cancel_at_any_step_leaves_the_others_and_the_bytes_alone(kind: Any, first: int, every: int) -> None:
    for number in range(first, 90, every):
        life(Failing(kind), "123"[number % 3], number // 3)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@places(few=40, parts=10)
@pytest.mark.parametrize("error", [Fault, RuntimeError])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_call_leaves_no_wrong_answer_and_no_lost_byte(
    kind: Any, error: Any, first: int, every: int
) -> None:
    whole = Failing(kind)
    life(whole)
    assert whole.calls > 50
    for call in range(1 + first, whole.calls + 1, every):
        server = Failing(kind)
        server.fail_at, server.error = call, error
        life(server)
        assert server.faults == 1
