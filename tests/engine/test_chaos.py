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
from types import FrameType
from typing import Any

import pytest

from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.prefill import planned
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.lending import LentRows
from start_llm.kvcache.resident import ResidentKV, Sizes
from start_llm.kvcache.store import KVStore
from start_llm.kvcache.tree import SegmentTree
from tests.engine.served import SYSTEM, Server
from tests.memory_folder import memory_folder
from tests.oracle import Oracle, build_oracle

ROOT = str(Path(__file__).resolve().parents[2] / "start_llm")
BUDGET = 6_000
Site = tuple[str, tuple[str, ...]]


def before(server: Server) -> None:
    """An earlier process, which left KV on disk."""
    server.ask([SYSTEM], "earlier " * 30, 1)
    server.finish()


def play(server: Server) -> None:
    """What happens in it: the first request and the last one are answered, two are cancelled."""
    scheduler, shared = server.scheduler, "the same " * 30
    # 1. together: two that share an uncomputed beginning, one of its own, one that is cancelled on the way
    first = server.ask([SYSTEM], f"{shared} a", 6, "a")
    server.ask([SYSTEM], f"{shared} b", 9)
    server.ask([SYSTEM], "something else", 15)
    cancelled = server.ask([SYSTEM], "cancelled", 30)
    while len(cancelled.sink.tokens) < 4 and scheduler.busy:
        server.step()
    scheduler.requests.cancel(cancelled.name)
    server.finish()
    # 2. idle: re-anchoring, a look from outside, writing behind
    guess = [*first.messages, {"role": "assistant", "content": "a guess"}, {"role": "user", "content": "and then"}]
    tokens = server.guess(guess, "a")
    server.finish()
    planned(scheduler.store, tokens)
    scheduler.store.idle()
    scheduler.figures()
    # 3. a next turn, one cancelled in its prompt, and enough others that KV is evicted
    server.ask([*guess, {"role": "assistant", "content": "no"}], "go on", 3, "a")
    cancelled = server.ask([SYSTEM], "long " * 300, 1)
    server.step()
    server.step()
    scheduler.requests.cancel(cancelled.name)
    server.finish()
    for number in range(3):
        server.ask([SYSTEM], f"number {number} " * 30, 2)
        server.finish()
    # 4. what was evicted comes back from disk, and what an earlier process left there
    server.store.disk.flush()
    for text in ("earlier " * 30, f"{shared} a", "the next request"):
        server.ask([SYSTEM], text, 5)
        server.finish()


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
    oracle: Oracle, folder: Path | None, on_call: Callable[[Site], None], script: Callable[[Server], None] = play
) -> Server:
    turns = count()
    # Eviction goes by times: on a busy machine other places would be reached.
    clock = lambda: next(turns) / 1000  # noqa: E731
    disk = None if folder is None else DiskTier(folder, "f" * 64, 1 << 30)
    server = Server(oracle, BUDGET, 10 * BUDGET, disk=disk, clock=clock)
    try:
        with watched(on_call):
            script(server)
    finally:
        server.close()
    return server


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "disk"), [("plain", False), pytest.param("hybrid", True, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_fault_anywhere_is_nobody_elses(
    kind: Any, disk: bool, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    oracle, kept = Oracle.load(build_oracle(memory / "oracle", kind)), memory / "kept"
    if disk:
        lived(oracle, kept, lambda site: None, before)

    def folder(name: str) -> Path | None:
        return Path(shutil.copytree(kept, memory / name)) if disk else None

    sites: dict[Site, None] = {}
    plain = lived(oracle, folder("plain"), lambda site: sites.setdefault(site))
    assert plain.failed() == []
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

        server = lived(oracle, folder(str(number)), on_call)
        assert raised, fault
        server.faults = len(raised)
        failed = server.failed()
        assert len(failed) <= (1 if fault[0].startswith(ONE_ENDS) else 0), (fault, failed)
        assert server.requests[-1].name not in failed, fault
        assert not server.store.lent_rows.nbytes and server.scheduler.running == 0, fault
