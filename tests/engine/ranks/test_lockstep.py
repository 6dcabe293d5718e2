"""A scheduler that follows another one's log: it does the same, step by step, and notices when it does not."""

from __future__ import annotations

import json
import random
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Sampled
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Constraint, Submit, ThinkingLimit
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.ranks import follower
from start_llm.engine.ranks.channel import Channel, described, submit_of
from start_llm.engine.ranks.follower import FollowerGroup
from start_llm.engine.ranks.group import RankGroup
from start_llm.engine.ranks.lockstep import LeaderScheduler, follow
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.kvcache import evict, resident, sessions
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import FixedMemory, scheduler_on
from tests.engine.ranks.test_group import Rank
from tests.kinds import rounds
from tests.oracle import Oracle, build_oracle

KEY = b"k" * 32
ends_its_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
BUDGET = 8_000


class Log(Rank):
    """Rank 0, as far as it writes."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(0, 2)
        self._channel, self._sequence = channel, 1
        self._thread = threading.get_ident()

    def write(self, kind: str, *given: Any) -> None:
        self._sequence += 1
        self._channel.send([self._sequence, kind, *given])

    def agree(self, value: Any) -> Any:
        self.write("value", value)
        return value


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[int]:
    """What a follower's process would have ended with; here its thread ends."""
    found: SimpleQueue[int] = SimpleQueue()

    def leave(code: int) -> None:
        found.put(code)
        raise SystemExit

    monkeypatch.setattr(follower.os, "_exit", leave)
    return found


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        found: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=lambda: found.put(listener.accept()), daemon=True).start()
        client = Client(listener.address, authkey=KEY)
        here = Channel(found.get(timeout=60), KEY, leads=True)
        there = Channel(client, KEY)
    yield here, there
    for thread in threading.enumerate():
        if thread.name == "rank-log":  # a follower whose log ends before it has read "stop" ends the process
            thread.join(60)
    here.close()
    there.close()


@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Oracle:
    return Oracle.load(build_oracle(tmp_path / "model", request.param))


def make(oracle: Oracle, make_scheduler: Any, ranks: RankGroup, budget: int) -> Scheduler:
    config = StoreConfig(budget_bytes=budget, checkpoint_grid=64, checkpoints_recent=2, ghost_tokens=200)
    store = KVStore(LayerKit(oracle.model.make_cache), config, clock=ranks.clock)
    guarded = GuardedStore(store, oracle.model.make_cache)
    runner, memory = ModelRunner(oracle.model, eos=[3], max_rows=3), FixedMemory(10 * BUDGET, budget)
    limits = {"step": None, "idle_step": 32, "join": 16, "decode_share": 0.5}
    return scheduler_on(runner, guarded, 3, memory, clock=ranks.clock, kind=make_scheduler, **limits)


def nobody(event: Any) -> None:
    """Takes the events of a request that nobody reads."""


def play(scheduler: Scheduler, rounds: int) -> None:
    """Turns that fork, join, are cancelled, and grow beyond the memory; idle work between them."""
    pick, ends = random.Random(4), [(2,)]
    for turn in range(rounds):
        for side in range(pick.choice((1, 2, 4))):
            base = pick.choice(ends)
            tokens = (*base[: pick.randrange(len(base) + 1)], *(pick.randrange(8, 200) for _ in range(90)))
            ends = [*ends[-4:], tokens[:400]]
            prompt = Prompt(tokens, tuple(range(50, len(tokens), 50)), generation=len(tokens))
            work = Submit(f"{turn}.{side}", prompt, Sampling(temperature=0), 8, nobody, session=f"s{turn % 3}")
            scheduler.add(work)
        for _ in range(pick.randrange(1, 12)):
            scheduler.step()
        scheduler.cancel(f"{turn}.0")
        while scheduler.busy and pick.random() < 0.97:
            scheduler.step()
        if not scheduler.busy:
            next_turn = Prompt((*tokens[:100], *(pick.randrange(8, 200) for _ in range(40))))
            scheduler.add_idle(Submit(f"i{turn}", next_turn, Sampling(), 1, nobody))
            scheduler.step_idle()
            scheduler.tidy()


def figures(scheduler: Scheduler) -> dict[str, float]:
    return {"digest": scheduler.digest(), **scheduler.figures()}


def test_a_follower_does_the_same(
    oracle: Oracle, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(ends[0])
    ranks = FollowerGroup(1, ends[1], ["", ""], 600)
    ranks._thread = threading.get_ident()
    leader = make(oracle, lambda *a, **k: LeaderScheduler(*a, ranks=log, **k), log, BUDGET)
    play(leader, rounds(30, 6))
    log.write("stop")
    passes = _passes(oracle)
    for module in (evict, resident, sessions):  # objects lie elsewhere in another process, in another order
        monkeypatch.setattr(module, "id", lambda known: -id(known), raising=False)
    scheduler = make(oracle, Scheduler, ranks, BUDGET)
    follow(scheduler, ranks)
    assert figures(scheduler) == figures(leader)
    assert leader.figures()["kv_evicted"] > 0 and leader.figures()["tokens_prefilled_idle"] > 0
    assert _passes(oracle) == passes * 2


def _passes(oracle: Oracle) -> list[tuple[list[int], list[int]]]:
    """Tokens and places of each row. Not what is decoded: the model tells that by what it has answered before."""
    return [(each.tokens, each.offsets) for each in oracle.model.work.passes]


def test_a_follower_that_goes_another_way_ends(
    oracle: Oracle, ends: tuple[Channel, Channel], codes: SimpleQueue[int]
) -> None:
    log, ranks = Log(ends[0]), FollowerGroup(1, ends[1], ["", ""], 600)
    ranks._thread = threading.get_ident()
    play(make(oracle, lambda *a, **k: LeaderScheduler(*a, ranks=log, **k), log, BUDGET), 7)
    log.write("stop")
    with pytest.raises(SystemExit):
        follow(make(oracle, Scheduler, ranks, BUDGET // 2), ranks)
    assert codes.get(timeout=60) == 75
    while (message := ends[0].receive())[0] == "done":
        pass
    assert message[0] == "failed" and "rank 0's" in message[1]


def test_a_step_that_not_all_have_confirmed_says_nothing(oracle: Oracle, ends: tuple[Channel, Channel]) -> None:
    class Alone(Log):
        confirmed = 0

        def confirm(self, digest: int) -> None:
            self.confirmed += 1
            if self.confirmed == 3:
                raise SystemExit

    log, events = Alone(ends[0]), SimpleQueue[Any]()
    leader = make(oracle, lambda *a, **k: LeaderScheduler(*a, ranks=log, **k), log, BUDGET)
    leader.add(Submit("a", Prompt((2, 9, 9)), Sampling(temperature=0, logit_bias=((3, -100.0),)), 20, events.put))
    leader.step()
    leader.step()
    (job,) = leader.requests
    with pytest.raises(SystemExit):
        leader.step()
    sampled = [events.get_nowait() for _ in range(events.qsize())]
    assert len(job.generated) > sum(isinstance(event, Sampled) for event in sampled)
    Log(ends[0]).write("stop")


@pytest.mark.parametrize("name", ["decode", "prefill", "sample", "suspend", "remove"])
def test_an_error_in_a_pass_ends_all(
    oracle: Oracle, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Broken:
        def fault(self, *_: Any) -> Any:
            raise MemoryError("no room")

        __getitem__ = __getattr__ = __bool__ = fault

    runner = ModelRunner(oracle.model, eos=[3], max_rows=3, ranks=Log(ends[0]))
    monkeypatch.setattr(runner, "_rows", Broken())
    monkeypatch.setattr(runner, "_batches", Broken())
    given = {"prefill": (oracle.model.make_cache(), [2, 9]), "suspend": (1,), "remove": (1,)}.get(name, ())
    with pytest.raises(SystemExit, match="MemoryError: no room"):
        getattr(runner, name)(*given)


def test_an_error_of_the_store_ends_all(
    oracle: Oracle, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room")

    ranks = Log(ends[0])
    store = KVStore(LayerKit(oracle.model.make_cache), StoreConfig(budget_bytes=BUDGET))
    guarded = GuardedStore(store, oracle.model.make_cache, passing=ranks.passing)
    monkeypatch.setattr(store, "idle", fault)
    with pytest.raises(SystemExit):
        guarded.idle()


@ends_its_thread
@pytest.mark.parametrize("line", [b"no JSON", b"{}", b"[]", b"[7]", b"\xff"])
def test_a_line_that_is_no_entry_ends_a_follower(
    ends: tuple[Channel, Channel], codes: SimpleQueue[int], line: bytes
) -> None:
    FollowerGroup(1, ends[1], ["", ""], 600)
    ends[0]._connection.send_bytes(line)
    assert codes.get(timeout=60) == 75
    assert "is no entry" in ends[0].receive()[1]


@ends_its_thread
@pytest.mark.parametrize(("kind", "seconds"), [("lost", 600), ("stop", 0.5)], ids=["a rank is lost", "told to stop"])
def test_a_follower_whose_pass_never_ends_ends_all_the_same(
    kind: str, seconds: float, ends: tuple[Channel, Channel], codes: SimpleQueue[int]
) -> None:
    FollowerGroup(1, ends[1], ["", ""], seconds)
    Log(ends[0]).write(kind)  # nobody asks for the next entry
    assert codes.get(timeout=60) == 75


def test_silence_is_noticed_and_a_limit_that_becomes_less_counts_at_once(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    found: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:
        try:
            here.receive()
        except TimeoutError as error:
            found.put(error)

    threading.Thread(target=receive, daemon=True).start()
    with pytest.raises(Empty):
        found.get(timeout=0.5)
    here.limit = 0.05
    assert found.get(timeout=60)
    here.limit = 60
    there.show_life(0.2)
    there.send(["words"])
    assert here.receive() == ["words"]
    there.close()
    with pytest.raises((OSError, EOFError)):
        here.receive()


numbers = st.integers(0, 2**31)


class Event:
    """One of a row's events."""


@given(
    tokens=st.lists(numbers, max_size=9).map(tuple),
    bias=st.lists(st.tuples(numbers, st.floats(-100, 100)), max_size=3).map(tuple),
    constraint=st.none() | st.builds(Constraint, st.text(), st.lists(numbers).map(tuple), st.booleans()),
    thinking=st.none() | st.builds(ThinkingLimit, numbers, numbers, numbers, st.booleans()),
    session=st.none() | st.text(),
)
def test_a_request_arrives_as_it_was_sent(tokens: Any, bias: Any, constraint: Any, thinking: Any, session: Any) -> None:
    prompt, sampling = Prompt(tokens, tokens, len(tokens), None, 3), Sampling(logit_bias=bias, seed=7)
    work = Submit("a", prompt, sampling, 5, nobody, 2, constraint, thinking, session, session, one_shot=True, model="m")
    arrived = submit_of(json.loads(json.dumps(described(work))))
    assert arrived == work
    event: Any = Event()
    arrived.sink(event)
    kept = weakref.ref(event)
    del event
    assert kept() is None, "nobody reads it on a follower, and the end of a failed row holds arrays"
