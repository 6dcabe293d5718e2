"""Requests that take over what is stored, on the oracle: in random orders, with forks, cancels and faults in between.

The oracle's KV is the token history, so that a row which is wrong by one token gives another answer. After each step
every stored segment is compared with its own tokens, wherever its KV lies: in the tree, in a row, in a batch.
"""

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

from scripts.bench.drafting import Published
from start_llm.core.events import Failed
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode import layerwise
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.jobs import Job
from start_llm.kvcache import layers
from start_llm.kvcache.kinds import leaves
from start_llm.kvcache.layers import LayerKit, eval_and_free
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.tree import Segment
from tests.engine.fakes import Collected, FixedMemory, engine_step, scheduler_on
from tests.kvcache.test_rows import check
from tests.oracle import Oracle, build_oracle, expected_truth

KINDS: tuple[Any, ...] = ("plain", "hybrid", "windowed")
START, END = 2, 3
TOKEN_BYTES = 16
MANY = 1 << 30
GREEDY = Sampling(temperature=0)
WIDE_IS_CHEAP = {1: 1.0, 32: 1.2}
COPIES = (layers, layerwise)  # they call `eval_and_free`
Message = dict[str, str]


@cache
def oracle(kind: Any) -> Oracle:
    with TemporaryDirectory() as folder:
        return Oracle.load(build_oracle(Path(folder) / kind, kind))


def rows_of(segment: Segment) -> tuple[list[int], list[int]]:
    """The keys and values that the oracle has written."""
    return (segment.tokens + 1).tolist(), list(range(segment.start, segment.end))


class Fault(Exception):
    """Of a program."""


class Request:
    def __init__(self, name: str, messages: list[Message], tokens: list[int], answer: str) -> None:
        self.name, self.messages, self.tokens, self.answer = name, messages, tokens, answer
        self.sink = Collected()


class Server:
    """A scheduler whose every call below can fail, and clients that know what they must be answered.

    These are the calls of the layer kit, the passes of the model, and each copy of KV that moves, joins or grows.

    Args:
        stored, running: the most bytes of KV.
        drafts: rows verify drafts.
        arrays: the most of stored KV; 0: no limit.
    """

    METHODS = (
        *("slice", "checkpoint", "part", "parts", "build", "adopt", "take_buffers", "make_room", "buffers"),
        *("packed", "packed_rows"),
    )

    def __init__(self, kind: Any, stored: int = MANY, running: int = 0, drafts: bool = False, arrays: int = 0) -> None:
        self.oracle = oracle(kind)
        make_cache = self.oracle.model.make_cache
        self.kit = LayerKit(make_cache)
        config = StoreConfig(stored, checkpoint_grid=32, checkpoints_recent=2, ghost_tokens=400, most_arrays=arrays)
        self.store = KVStore(self.kit, config)
        guarded = GuardedStore(self.store, make_cache)
        self.drafts = Drafts(DraftGate(Published(WIDE_IS_CHEAP))) if drafts else None
        runner = ModelRunner(self.model, eos=[END], max_rows=3, gate=self.drafts.gate if self.drafts else None)
        memory, limits = FixedMemory(running, stored), {"step": 24, "idle_step": 16, "join": 16}
        self.scheduler = scheduler_on(runner, guarded, 3, memory, drafts=self.drafts, **limits)
        self.requests: list[Request] = []
        self.calls = 0
        self.fail_at: int | None = None  # a call
        self.error: Callable[[], Exception] = Fault
        self.faults = 0
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
            return self.oracle.model(inputs, cache=cache)
        error = self.error()
        if isinstance(error, RuntimeError):
            for leaf in leaves(cache):
                if isinstance(leaf, KVCache | BatchKVCache) and leaf.keys is not None:
                    leaf.keys, leaf.values = mx.zeros_like(leaf.keys), mx.zeros_like(leaf.values)
        raise error

    def ask(self, history: list[Message], text: str, filler: int) -> Request:
        messages = [*history, {"role": "user", "content": f"{text} [[truth]][[long {filler}]]"}]
        tokens = self.oracle.prompt(messages)
        request = Request(str(len(self.requests)), messages, tokens, f"{expected_truth(tokens)}\n{' the' * filler}")
        marks = tuple(place for place, token in enumerate(tokens) if token == START and place)
        prompt = Prompt(tuple(tokens), boundaries=marks, generation=len(tokens) - 3, system_end=marks[0])
        self.requests.append(request)
        self.scheduler.add(Submit(request.name, prompt, GREEDY, 200, request.sink, session=request.name))
        return request

    def step(self) -> None:
        """One step, and a look at what is stored."""
        engine_step(self.scheduler)
        self.check()

    def finish(self) -> None:
        for _ in range(5_000):
            if not self.scheduler.busy and not self.scheduler.idle_prefill.waiting:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def check(self) -> None:
        armed, self.fail_at = self.fail_at, None
        calls = self.calls
        jobs: list[Job] = [*self.scheduler.requests]
        if (idle := self.scheduler.idle_prefill._job) is not None:
            jobs.append(idle)
        lent = {id(job.lent) for job in jobs if job.lent is not None}
        assert set(self.store.lent_rows._rows) <= lent, "KV of the tree is lent to nobody"
        check(self.store, running=len(self.store.lent_rows._rows), expected=rows_of)
        self.calls, self.fail_at = calls, armed

    def check_answers(self) -> None:
        for request in self.requests:
            final = request.sink.final
            expected = self.oracle.model.answers.encode(request.answer)
            if isinstance(final, Failed):
                assert self.faults, final
            else:
                said = [token for token in request.sink.tokens if token != END]
                cut = request.sink.done.reason == "cancelled"
                assert said == expected[: len(said)] and (cut or said == expected), (request.name, final)

    def close(self) -> None:
        if self.drafts is not None:
            self.drafts.close()


SYSTEM: Message = {"role": "system", "content": "You are careful. " + "word " * 12}


class Interleaving:
    """Requests that begin, fork, are cancelled and preempted in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        stored, running = (self.random.choice([MANY, n * TOKEN_BYTES]) for n in (150, 500))
        running, arrays = 0 if running == MANY else running, (0, 12, 30, 20)[seed % 4]
        self.server = Server(KINDS[seed % 3], stored, running, drafts=seed % 2 == 0, arrays=arrays)
        self.faults = seed % 5 > 1

    def history(self) -> list[Message]:
        """Of an earlier conversation: all of it, or its beginning."""
        ended = [r for r in self.server.requests if r.sink.final is not None and not isinstance(r.sink.final, Failed)]
        if not ended or self.random.random() < 0.2:
            return [SYSTEM]
        request = self.random.choice(ended[-4:])
        if self.random.random() < 0.3:
            return request.messages[: self.random.randrange(1, len(request.messages), 2)]
        said = self.server.oracle.tokenizer.decode([token for token in request.sink.tokens if token != END])
        return [*request.messages, {"role": "assistant", "content": said}]

    def begin(self) -> None:
        words = " ".join(self.random.choice(("one", "two", "three")) for _ in range(self.random.randint(1, 25)))
        self.server.ask(self.history(), words, self.random.choice([1, 3, 12]))

    def cancel(self) -> None:
        self.server.scheduler.requests.cancel(self.random.choice(self.server.requests).name)

    def idle(self) -> None:
        tokens = tuple(self.server.oracle.prompt([*self.history(), {"role": "user", "content": "a guess"}]))
        work = Submit("idle", Prompt(tokens, generation=len(tokens)), GREEDY, 1, Collected())
        self.server.scheduler.idle_prefill.begin(work)

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
        server.check_answers()
        assert not server.store.lent_rows._rows
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
    server = Server("plain")
    first = server.ask([SYSTEM], "one", 3)
    server.finish()
    said = server.oracle.tokenizer.decode([token for token in first.sink.tokens if token != END])
    history = [*first.messages, {"role": "assistant", "content": said}]
    tokens = tuple(server.oracle.prompt([*history, {"role": "user", "content": "three " * 40}]))
    idle = server.scheduler.idle_prefill
    idle.begin(Submit("idle", Prompt(tokens, generation=len(tokens)), GREEDY, 1, Collected()))
    while idle._job is None or idle._job.is_new:
        server.step()
    reached = idle._job.prefill.position
    assert len(first.tokens) < reached < len(tokens) and idle._job.lent is not None
    second = server.ask(history, "three " * 40, 3)
    server.finish()
    server.check_answers()
    assert second.sink.done.report.reused >= reached
    server.close()


@pytest.mark.thorough
def test_requests_in_any_order_are_answered_by_what_they_said_and_lose_no_byte() -> None:
    for seed in range(6):
        Interleaving(seed).play(12)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_orders_on_the_oracle(part: int) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        Interleaving(seed).play(12)


def life(server: Server, cancelled: str = "", at: int = -1) -> None:
    """Two turns, and a fork that reads the first while the second has taken it over. A request is cancelled in front of
    step `at`, which counts from the beginning of the second turn."""
    first = server.ask([SYSTEM], "one two three " * 3, 3)
    server.finish()
    said = server.oracle.tokenizer.decode([token for token in first.sink.tokens if token != END])
    history = [*first.messages, {"role": "assistant", "content": said}]
    server.ask(history, "two", 12)
    for step in range(5_000):
        if step == 3:
            server.ask(first.messages[:1], "one two", 8)
        if step == 6:
            server.ask(history, "three", 2)
        if step == at:
            server.scheduler.requests.cancel(cancelled)
        if not server.scheduler.busy:
            break
        server.step()
    server.ask(history, "two", 3)
    server.finish()
    server.check_answers()
    assert not server.store.lent_rows._rows
    server.close()


def slow_parts(count: int) -> list[Any]:
    """All places in so many parts: each takes every `count`-th place, from another first one on."""
    return [pytest.param(first, count, marks=pytest.mark.slow) for first in range(count)]


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("first", "every"), [(0, 13), *slow_parts(3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cancel_at_any_step_leaves_the_others_and_the_bytes_alone(kind: Any, first: int, every: int) -> None:
    for number in range(first, 90, every):
        life(Server(kind), "123"[number % 3], number // 3)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("first", "every"), [(0, 40), *slow_parts(10)])
@pytest.mark.parametrize("error", [Fault, RuntimeError])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_call_leaves_no_wrong_answer_and_no_lost_byte(
    kind: Any, error: Any, first: int, every: int
) -> None:
    whole = Server(kind)
    life(whole)
    assert whole.calls > 50
    for call in range(1 + first, whole.calls + 1, every):
        server = Server(kind)
        server.fail_at, server.error = call, error
        life(server)
        assert server.faults == 1
