"""Every public method of the store, its disk tier, the tree, the runner and the guard of memory raises once, at each
place that calls it. (`tests/modelpool/test_chaos.py` does the same to what loads and unloads models.)

A short life of a server is played on the oracle model: prompts that share a beginning, a cancelled one, a next turn,
re-anchoring, eviction, KV that comes back from disk. First without a fault, noting who calls what; then once for each
such place, with a fault there. Nobody but the request that the fault belongs to may notice it.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from start_llm.core.events import EngineDone, EngineEvent, Failed, Sampled
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.prefill import planned
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.lending import LentRows
from start_llm.kvcache.resident import ResidentKV, Sizes
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.tree import SegmentTree
from tests.engine.fakes import Collected, FixedMemory, engine_step, scheduler_on
from tests.oracle import Oracle, build_oracle

ROOT = str(Path(__file__).resolve().parents[2] / "start_llm")
START, END = 2, 3
BUDGET = 6_000
Site = tuple[str, tuple[str, ...]]
GREEDY = Sampling(temperature=0)
SYSTEM = {"role": "system", "content": "You are careful. " + "word " * 30}


class Client(Collected):
    """`on_token` is called after each of its tokens."""

    def __init__(self, on_token: Callable[[int], None] = lambda count: None) -> None:
        super().__init__()
        self.on_token = on_token

    def __call__(self, event: EngineEvent) -> None:
        super().__call__(event)
        if isinstance(event, Sampled):
            self.on_token(len(self.tokens))


class Life:
    """One server's life, on the thread that plays it."""

    def __init__(self, oracle: Oracle, folder: Path | None) -> None:
        self.oracle = oracle
        make_cache, turns = oracle.model.make_cache, count()
        # Eviction goes by times: on a busy machine other places would be reached.
        clock = lambda: next(turns) / 1000  # noqa: E731
        disk = None if folder is None else DiskTier(folder, "f" * 64, 1 << 30)
        self.store = KVStore(
            LayerKit(make_cache),
            StoreConfig(budget_bytes=BUDGET, checkpoint_grid=64, checkpoints_recent=2, ghost_tokens=200),
            disk=disk,
            clock=clock,
        )
        self.guarded = GuardedStore(self.store, make_cache)
        self.runner = ModelRunner(oracle.model, eos=[END], max_rows=4)
        memory, limits = FixedMemory(10 * BUDGET, BUDGET), {"step": 64, "idle_step": 32, "join": 16}
        self.scheduler = scheduler_on(self.runner, self.guarded, 4, memory, clock=clock, **limits)
        self.clients: dict[str, Client] = {}

    def prompt(self, *texts: str) -> tuple[int, ...]:
        roles = ("user", "assistant")
        asked = [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]
        return tuple(self.oracle.prompt(asked))

    def ask(self, name: str, *texts: str, **client: Any) -> None:
        tokens = self.prompt(*texts)
        sink = self.clients[name] = Client(**client)
        marks = tuple(i for i, token in enumerate(tokens) if token == START and i)
        prompt = Prompt(tokens, boundaries=marks, generation=len(tokens) - 3, system_end=marks[0])
        self.scheduler.add(Submit(name, prompt, GREEDY, 80, sink, session=name[0]))

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not self.scheduler.busy and not self.scheduler.idle_prefill.waiting:
                return
            engine_step(self.scheduler)
        raise AssertionError("it does not come to an end")

    def close(self) -> None:
        self.runner.close()
        self.guarded.close()


def before(life: Life) -> None:
    """An earlier process, which left KV on disk."""
    life.ask("z", "earlier " * 30)
    life.run()


def play(life: Life) -> None:
    """What happens in it."""
    scheduler = life.scheduler
    # 1. together: two that share an uncomputed beginning, one of its own, one that is cancelled on the way
    shared = "the same " * 30
    life.ask("a", f"{shared} a [[find: careful]][[long 6]]")
    life.ask("b", f"{shared} b [[long 9]]")
    life.ask("c", "something else [[long 15]]")
    cancel = lambda count: scheduler.requests.cancel("d") if count == 4 else None  # noqa: E731
    life.ask("d", "cancelled [[long 30]]", on_token=cancel)
    life.run()
    # 2. idle: re-anchoring, a look from outside, writing behind
    history = (f"{shared} a [[find: careful]][[long 6]]", "a guess at the answer", "and then")
    tokens = life.prompt(*history)
    shape = Prompt(tokens, boundaries=(40, 80))
    scheduler.idle_prefill.begin(Submit("anchor", shape, GREEDY, 1, Client(), session="a"))
    life.run()
    planned(scheduler.store, tokens)
    scheduler.store.idle()
    scheduler.figures()
    # 3. a next turn, one cancelled in its prompt, and enough others that KV is evicted
    life.ask("a2", *history, "no", "[[find: careful]][[long 3]]")
    life.ask("e", "long " * 300)
    scheduler.step()
    scheduler.step()
    scheduler.requests.cancel("e")
    life.run()
    for i in range(3):
        life.ask(f"f{i}", f"number {i} " * 30 + "[[long 2]]")
        life.run()
    # 4. what was evicted comes back from disk, and what an earlier process left there
    life.store.disk.flush()
    life.ask("z", "earlier " * 30, "no", "but [[long 5]]")
    life.run()
    life.ask("a3", f"{shared} a [[find: same]][[long 5]]")
    life.run()
    life.ask("next", "the next request [[find: careful]]")
    life.run()


METHODS = {
    KVStore: (
        *("lookup", "peek", "stops", "restore", "put", "take_back"),
        *("idle", "has_room", "set_budget", "stats"),
    ),
    ResidentKV: ("fill", "tidy"),
    Sizes: ("estimate",),
    LentRows: ("lend", "moved", "take_back", "fill_from"),
    LayerKit: ("build", "make_room", "take_buffers"),
    SegmentTree: ("__iter__", "walk", "read_consistently", "extend", "split", "absorb", "remove"),
    ModelRunner: ("prefill", "insert", "decode", "remove", "clear"),
    MemoryGuard: ("admits", "check", "most_tokens", "take", "give"),
}
DISK = {DiskTier: ("has_room", "write", "touch", "read", "take_lost", "stats")}
ONE_ENDS = ("ModelRunner", "MemoryGuard")
"""What is asked for one request: that one may end by it."""


def site_of(frame: FrameType | None, depth: int = 3) -> tuple[str, ...]:
    """The nearest callers in the product, guards left out."""
    found: list[str] = []
    while frame is not None and len(found) < depth:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and not name.endswith("guarded.py"):
            found.append(f"{name[len(ROOT) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


@contextmanager
def watched(on_call: Callable[[Site], None]) -> Iterator[None]:
    """Tells `on_call` of each call on this thread; a server of an earlier test may still be at its end on another."""
    mine = threading.get_ident()

    def told(site: Site) -> None:
        if threading.get_ident() == mine:
            on_call(site)

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (METHODS | DISK).items():
            for name in names:
                patch.setattr(owner, name, wrapped(getattr(owner, name), f"{owner.__name__}.{name}", told))
        yield


def wrapped(method: Callable[..., Any], name: str, on_call: Callable[[Site], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        on_call((name, site_of(sys._getframe(1))))
        return method(*args, **kwargs)

    return call


def lived(
    oracle: Oracle, folder: Path | None, on_call: Callable[[Site], None], script: Callable[[Life], None] = play
) -> Life:
    life = Life(oracle, folder)
    try:
        with watched(on_call):
            script(life)
    finally:
        life.close()
    return life


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Where writing through costs nothing, if this machine has such a place."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "disk"), [("plain", False), pytest.param("hybrid", True, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_fault_anywhere_is_nobody_elses(
    kind: Any, disk: bool, memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    oracle, kept = Oracle.load(build_oracle(memory_folder / "oracle", kind)), memory_folder / "kept"
    if disk:
        lived(oracle, kept, lambda site: None, before)

    def folder(name: str) -> Path | None:
        return Path(shutil.copytree(kept, memory_folder / name)) if disk else None

    sites: dict[Site, None] = {}
    plain = lived(oracle, folder("plain"), lambda site: sites.setdefault(site))
    expected = {name: client.tokens for name, client in plain.clients.items()}
    assert all(isinstance(client.final, EngineDone) for client in plain.clients.values())
    wrapped = METHODS | (DISK if disk else {})
    methods = {f"{owner.__name__}.{name}" for owner, names in wrapped.items() for name in names}
    missing = methods - {name for name, _ in sites}
    assert missing == {"ModelRunner.clear"} | ({"SegmentTree.remove"} if disk else set()), missing
    assert len(sites) > 40

    for number, fault in enumerate(sites):
        raised: list[Site] = []

        def on_call(site: Site, fault: Site = fault, raised: list[Site] = raised) -> None:
            if site == fault and not raised:
                raised.append(site)
                raise RuntimeError("a fault")

        life = lived(oracle, folder(str(number)), on_call)
        assert raised, fault
        failed = [name for name, client in life.clients.items() if isinstance(client.final, Failed)]
        assert len(failed) <= (1 if fault[0].startswith(ONE_ENDS) else 0), (fault, failed)
        for name, client in life.clients.items():
            assert client.final is not None, (fault, name)
            if name not in {*failed, "d", "e"}:  # two are cancelled, sooner or later
                assert client.tokens == expected[name], (fault, name)
        assert "next" not in failed
        assert not life.store.lent_rows.nbytes, fault
        assert not life.scheduler.busy and life.scheduler.running == 0
