"""Memory runs short while rows grow: the youngest waits, nothing is lost, and every answer is what it is alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.errors import OutOfMemory
from start_llm.core.events import Failed, Sampled
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.quantised import Quantisation
from start_llm.engine.schedule import preemption as pressure
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import LEAST_STORED, MemoryGuard, SharedMemory
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.host.pressure import Pressure
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.models.device import GIB, STORED_SHARE
from start_llm.models.room import Weights
from tests.engine.decode.test_verify import Eager
from tests.engine.fakes import Collected, FakeRunner, FakeStore, FixedMemory, ask, scheduler_on, steps_until, submit
from tests.engine.schedule.test_scheduler import drain, make
from tests.kvcache.tiny import model, random_tokens

MIB = 2**20
FAR = 100_000  # an answer may be as long as the context


def short_of_memory(tokens: int, **more: Any) -> tuple[Scheduler, FakeRunner, FakeStore]:
    """A scheduler on the fakes, with memory for so many tokens of KV."""
    store = more.pop("store", None) or FakeStore(token_bytes=MIB)
    scheduler, runner, store, _ = make(runner=more.pop("runner", None), store=store, memory=tokens * MIB, **more)
    return scheduler, runner, store


def add(scheduler: Scheduler, count: int, prompt: int = 100, max_tokens: int = FAR) -> list[Collected]:
    return [
        ask(scheduler, f"r{i}", range(10_000 * i + 1, 10_000 * i + 1 + prompt), max_tokens=max_tokens)
        for i in range(count)
    ]


def paused(scheduler: Scheduler) -> int:
    return int(scheduler.figures()["requests_paused"])


def test_what_may_never_be_used_is_not_reserved() -> None:
    scheduler, runner, _ = short_of_memory(4 * (100 + pressure.TYPICAL_ANSWER), runner=FakeRunner(answer=20))
    sinks = add(scheduler, 4)
    drain(scheduler)
    assert runner.widest == 4
    assert [sink.done.reason for sink in sinks] == ["stop"] * 4
    assert paused(scheduler) == 0


def test_the_youngest_row_waits_and_goes_on_where_it_was() -> None:
    alone = []
    for i in range(3):
        scheduler, *_ = make(runner=FakeRunner(answer=1500))
        sink = ask(scheduler, "a", range(10_000 * i + 1, 10_000 * i + 101), max_tokens=FAR)
        drain(scheduler, 3000)
        alone.append(sink.tokens)
    scheduler, runner, _ = short_of_memory(3 * 1200, runner=FakeRunner(answer=1500))
    sinks = add(scheduler, 3)
    steps_until(scheduler, lambda: paused(scheduler))
    assert (len(runner.rows), len(scheduler.requests.waiting)) == (2, 1)
    assert [len(sink.tokens) > 1000 for sink in sinks] == [True] * 3
    work = runner.work
    drain(scheduler, 6000)
    assert [sink.tokens for sink in sinks] == alone
    assert [sink.done.reason for sink in sinks] == ["stop"] * 3
    assert runner.work == work  # what was computed was stored, and nothing was computed again
    assert paused(scheduler) <= 3  # a row does not come back before there is room for it


def test_a_row_that_was_paused_goes_before_those_that_never_ran() -> None:
    scheduler, _, _ = short_of_memory(2 * 1300, runner=FakeRunner(answer=1400))
    first = add(scheduler, 2)
    late_sink = ask(scheduler, "late", range(90_001, 91_101), max_tokens=FAR)
    steps_until(scheduler, lambda: paused(scheduler))
    assert [job.work.id for job in scheduler.requests.waiting] == ["r1", "late"]
    drain(scheduler, 6000)
    everything = [sink.done for sink in (*first, late_sink)]
    assert [done.reason for done in everything] == ["stop"] * 3
    assert late_sink.done.report.seconds_queued > first[1].done.report.seconds_queued


def test_a_prompt_in_the_middle_of_its_prefill_can_wait_too() -> None:
    scheduler, runner, store = short_of_memory(6000, runner=FakeRunner(answer=200))
    old = add(scheduler, 1)[0]
    young = ask(scheduler, "young", range(50_001, 51_701), max_tokens=FAR)
    steps_until(scheduler, lambda: len(old.tokens) >= 5)
    store.token_bytes = 2 * MIB  # a token takes more than was thought
    scheduler.step()
    assert (paused(scheduler), len(scheduler.requests.waiting), len(runner.rows)) == (1, 1, 1)
    drain(scheduler)
    assert (old.done.reason, young.done.reason) == ("stop", "stop")
    assert runner.work == 99 + 1699


def test_cancelling_a_paused_row() -> None:
    scheduler, _, store = short_of_memory(2 * 1300, runner=FakeRunner(answer=1400))
    sinks = add(scheduler, 2)
    steps_until(scheduler, lambda: paused(scheduler))
    said = len(sinks[1].tokens)
    scheduler.requests.cancel("r1")
    scheduler.step()
    assert sinks[1].done.reason == "cancelled"
    assert len(sinks[1].done.tokens) == said
    assert any(len(entry) == 100 + said for entry in store.entries)
    drain(scheduler, 4000)
    assert sinks[0].done.reason == "stop"


def test_only_what_can_never_fit_is_refused() -> None:
    scheduler, _, _ = short_of_memory(1000, runner=FakeRunner(answer=5))
    fits_sink = ask(scheduler, "fits", range(1, 901), max_tokens=FAR)
    never_sink = ask(scheduler, "never", range(1, 1001), max_tokens=FAR)
    drain(scheduler)
    assert fits_sink.done.reason == "stop"
    assert isinstance(never_sink.final, Failed)
    assert never_sink.final.error.status == 507
    message = never_sink.final.error.message
    assert "for 1064 tokens" in message and "1.1 GB" in message and "1.0 GB are there" in message


def test_a_prompt_that_turns_out_too_large_ends_in_its_prefill() -> None:
    scheduler, runner, store = short_of_memory(1000, runner=FakeRunner(answer=5))
    sink = ask(scheduler, "a", range(1, 901), max_tokens=FAR)
    scheduler.step()
    store.token_bytes = 2 * MIB
    drain(scheduler)
    assert isinstance(sink.final, Failed) and sink.final.error.status == 507
    assert runner.work <= 200


def test_rows_are_counted_as_wide_as_the_batch_makes_them() -> None:
    """A short row beside a long one takes as much as the long one."""
    guard = MemoryGuard(GuardedStore(FakeStore(token_bytes=MIB), list), FixedMemory(2000 * MIB, 0))  # type: ignore[arg-type]
    guard.take("long", 900)
    assert guard.admits(10) and guard.admits(1000) and not guard.admits(1001)
    guard.take("short", 10)
    assert not guard.over and not guard.admits(10)
    guard.take("long", 1001)
    assert guard.over
    assert guard.most_tokens() == 2000


# --- on real caches -----------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0)},
    "seeded": {
        "sampling": Sampling(temperature=0.9, seed=7, repetition_penalty=1.3, repetition_context_size=30, top_p=0.95)
    },
    "logprobs": {"sampling": Sampling(temperature=0, presence_penalty=0.5), "logprobs": 1},
}
ANSWER = 24
LONGEST = 50  # tokens of a prompt


def real(
    name: str, total: int, *, most_stored: int | None = None, kv_bits: int | None = None, drafts: Drafts | None = None
) -> Scheduler:
    new = lambda: make_prompt_cache(model(name))  # noqa: E731
    most = total if most_stored is None else most_stored
    guarded = GuardedStore(KVStore(LayerKit(new), StoreConfig(most)), new)
    quantisation = None if kv_bits is None else Quantisation(kv_bits, 32, LONGEST + 8)
    gate = drafts.gate if drafts is not None else None
    runner = ModelRunner(model(name), eos=[10**6], max_rows=4, gate=gate, quantisation=quantisation)
    guarded.learn(*runner.sample())
    return scheduler_on(runner, guarded, 4, FixedMemory(total, most), drafts=drafts, step=32)


def small(monkeypatch: pytest.MonkeyPatch, typical: int = 4, growth: int = 4) -> None:
    """Answers are taken to be short, and rows grow in small steps."""
    for name, tokens in (("TYPICAL_ANSWER", typical), ("LEAST_ANSWER", 4), ("GROWTH", growth)):
        monkeypatch.setattr(pressure, name, tokens)


def requests(way: str) -> list[tuple[Submit, Collected]]:
    out = []
    for i in range(3):
        work, sink = submit(f"r{i}", random_tokens(LONGEST - 9 * i, seed=i), max_tokens=ANSWER)
        out.append((replace(work, **WAYS[way]), sink))
    return out


def answers(scheduler: Scheduler, way: str, together: bool) -> list[Collected]:
    sinks = []
    for work, sink in requests(way):
        scheduler.add(work)
        sinks.append(sink)
        if not together:
            drain(scheduler)
    drain(scheduler, 5000)
    return sinks


@pytest.mark.parametrize(
    ("name", "way", "more"),
    [
        *(pytest.param("llama", way, {}, marks=pytest.mark.thorough) for way in WAYS),
        *(pytest.param(name, "seeded", {}, marks=pytest.mark.thorough) for name in ("qwen3_next", "gemma3_text")),
        pytest.param("qwen3_next", "seeded", {"most_stored": 1}, id="they lost their KV and compute it again"),
        pytest.param("llama", "seeded", {"kv_bits": 8}, id="their KV is quantised"),
    ],
)
def test_paused_rows_say_what_they_say_alone(
    name: str, way: str, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, 8, 5)
    plenty = real(name, 2**40, kv_bits=more.get("kv_bits"))
    enough = 3 * plenty.store.estimate(LONGEST + 18)  # to begin together, not to go on together
    alone = answers(plenty, way, together=False)
    scheduler = real(name, enough, **more)
    found = answers(scheduler, way, together=True)
    assert paused(scheduler) >= 1
    for sink, expected in zip(found, alone, strict=True):
        assert sink.done.tokens == expected.done.tokens and len(sink.tokens) == ANSWER
        assert sink.done.reason == "length"
        if way == "logprobs":
            said, meant = ([e.logprob for e in s.events if isinstance(e, Sampled)] for s in (sink, expected))
            assert [p.logprob for p in said if p] == pytest.approx([p.logprob for p in meant if p], abs=1e-2)


@pytest.mark.parametrize(
    ("name", "way", "drafted"),
    [
        pytest.param("llama", "seeded", False, marks=pytest.mark.thorough),
        pytest.param("llama", "greedy", True, marks=pytest.mark.thorough),
        ("qwen3_next", "seeded", True),
    ],
)
def test_a_row_that_decodes_alone_is_paused(
    name: str, way: str, drafted: bool, indexed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is younger than a long prompt that is still on its way, and has begun to decode before that."""
    small(monkeypatch)
    drafts = Drafts(Eager()) if drafted else None
    long, _ = submit("long", random_tokens(360, seed=1), max_tokens=4)
    short, _ = submit("short", random_tokens(40, seed=2), max_tokens=100)
    long, short = (replace(work, session=work.id, **WAYS[way]) for work in (long, short))
    plenty = real(name, 2**40, drafts=drafts)
    alone = [Collected(), Collected()]
    for work, sink in zip((long, short), alone, strict=True):
        plenty.add(replace(work, sink=sink))
        drain(plenty, 2000)
    scheduler = real(name, 2**40, drafts=drafts)
    found = [Collected(), Collected()]
    for work, sink, said in zip((long, short), found, alone, strict=True):
        scheduler.add(replace(work, sink=sink, views=partial(list, [said.tokens])))
    steps_until(scheduler, lambda: len(found[1].tokens) >= 3)
    assert found[0].tokens == []
    scheduler.requests._memory.shared.fixed = plenty.store.estimate(380)  # room for the longer one only
    scheduler.step()
    assert (paused(scheduler), scheduler.requests.waiting[0].work.id) == (1, "short")
    drain(scheduler, 2000)
    assert [sink.tokens for sink in found] == [sink.tokens for sink in alone]
    assert paused(scheduler) == 1
    if drafts is not None:
        assert scheduler.requests.decoded["accepted"] > 0
        drafts.close()


def test_a_row_that_is_alone_grows_to_the_end_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    scheduler = real("llama", real("llama", 2**40).store.estimate(120))
    sink = ask(scheduler, "a", random_tokens(60, seed=3), max_tokens=FAR)
    drain(scheduler, 2000)
    assert (sink.done.reason, len(sink.tokens)) == ("length", 60)
    assert paused(scheduler) == 0


class Held:
    """A store of so many bytes that shrinks to its budget."""

    arrays = 0
    shares = (0, 0)

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.most = nbytes, 0
        self.unguarded = SimpleNamespace(resident=self)

    def estimate(self, tokens: int) -> int:
        return tokens * MIB

    def set_budget(self, budget_bytes: int | None, others: int = 0, stores: int = 1) -> None:
        self.shares = others, stores
        if budget_bytes is None:
            return
        self.most = budget_bytes
        self.nbytes = min(self.nbytes, budget_bytes)


def test_models_share_what_their_weights_leave() -> None:
    asked: list[int] = []
    shared = SharedMemory(8 * GIB, None, lambda need: bool(asked.append(need)) or need < GIB)
    shared.place("one", Weights(GIB))
    one = MemoryGuard(first := Held(10**12), shared)
    one.take("a", 1)
    assert first.nbytes == first.most == int(6 * GIB * STORED_SHARE), "alone it has all of it"
    shared.place("two", Weights(2 * GIB))
    two = MemoryGuard(second := Held(0), shared)
    assert first.nbytes == first.most == int(4 * GIB * STORED_SHARE), "what the other does not need it keeps"
    assert second.most == first.most // 2, "but an equal part is sure"
    second.nbytes = second.most
    two.take("b", 1000)
    assert first.nbytes + second.nbytes <= int(4 * GIB * STORED_SHARE) and first.nbytes == first.most >= second.most
    two.take("b", 3000)
    assert first.most + second.most <= 4 * GIB - 3001 * MIB
    assert one.crowded and two.crowded and shared.running == 3001 * MIB
    assert not one.admits(600) and one.admits(500), "what the other model's request holds is not there"
    one.take("a", 1200)
    assert one.over and two.over
    one.give("a")
    assert not two.over and not two.crowded
    assert one.check(4000)
    assert not one.check(4200), "idle models are asked to go, and the request waits for that"
    with pytest.raises(OutOfMemory):
        one.check(8000)
    assert asked == [104 * MIB, 3904 * MIB]
    assert one.most_tokens() == 4096, "beside the other model"
    assert one.most_tokens("one") == 6144, "once the other one has gone for it"
    two.close()
    shared.place("two", None)
    assert one.check(4200) and first.most == int(6 * GIB * STORED_SHARE)


def test_models_share_the_devices_room_for_arrays() -> None:
    shared = SharedMemory(0, None, lambda need: False)
    one, two = MemoryGuard(first := Held(0), shared), MemoryGuard(second := Held(0), shared)
    first.arrays, second.arrays = 30, 70
    two.take("a", 1)
    assert (first.shares, second.shares) == ((70, 2), (30, 2))
    assert not first.most, "nobody knows how many bytes there are: it goes on with what it had"
    two.close()
    assert first.shares == (0, 1) and one.held_bytes == 0


def test_weights_that_models_share_take_their_bytes_once() -> None:
    shared = SharedMemory(8 * GIB, None, lambda need: False)
    alone = SharedMemory(8 * GIB, None, lambda need: False)
    alone.place("base", Weights(0, "folder", GIB))
    shared.place("base", Weights(0, "folder", GIB))
    shared.place("base+a", Weights(5 * MIB, "folder", GIB))
    assert shared.total == alone.total - 5 * MIB
    shared.place("base", None)
    assert shared.total == alone.total - 5 * MIB, "the adapter's model still has them"
    shared.place("base+a", None)
    assert shared.total == alone.total + GIB


def test_stored_kv_gives_way_in_steps_while_other_programs_need_the_memory() -> None:
    shared = SharedMemory(8 * GIB, None, lambda need: False)
    shared.place("one", Weights(GIB))
    MemoryGuard(store := Held(GIB), shared)
    shared.apply()
    before = store.most
    shared.press(Pressure.WARNING)
    assert store.nbytes == int(0.8 * GIB)
    shared.press(Pressure.CRITICAL)
    assert store.nbytes == int(0.4 * GIB)
    for _ in range(10):
        shared.press(Pressure.CRITICAL)
    assert store.nbytes == LEAST_STORED, "what helps nobody stays"
    shared.press(Pressure.NORMAL)
    assert store.most == before > GIB
