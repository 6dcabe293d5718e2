"""Whatever the pool of models calls raises once, at each place that calls it: who asked is told, nobody else notices.

A short life of a pool is played with models of no weight: they are loaded when they are asked for, go for one another,
for memory, by hand and by age. Meanwhile a request of the main model runs on. First without a fault, noting who calls
what; then once for each such place, with a fault there.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.core.events import EngineDone
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings, load_settings
from start_llm.engine.decode.row import DecodeRow
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.thread import EngineThread
from start_llm.modelpool import kinds, loader, registry
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.pool import Pool
from start_llm.modelpool.registry import ModelLease, ModelRegistry, RoomQueue
from start_llm.modelpool.resolve import DEFAULT_KEY, NameResolver
from start_llm.models.loader import BasesInMemory
from start_llm.models.room import Weights
from start_llm.prompt.clients import Clients
from tests.engine.fakes import FakeRunner, submit
from tests.engine.test_chaos import Site, wrapped
from tests.engine.test_thread import FakeRuntime, final
from tests.oracle import build_oracle
from tests.waiting import until

pytestmark = pytest.mark.thorough

WAIT = 60.0
PROMPT = [5, 7, 11]
ANSWER = 12


class Runner(FakeRunner):
    """Leaves the others some of the processor."""

    def decode(self) -> list[DecodeRow]:
        time.sleep(0.0005)
        return super().decode()


class Pipeline:
    """And a recorder."""

    def close(self) -> None:
        """Nothing is open, nothing is recorded."""

    def counters(self) -> dict[str, float]:
        return {"turns": 1.0}


class Builder:
    """Makes models in three steps. Stands for `ModelBuilder`.

    Attributes:
        made: all models that it has made, by name.
    """

    ranks = Ranks()

    def __init__(self) -> None:
        self.shared = SimpleNamespace(running=0, weight_bytes=0, usable=0)
        self.made: list[tuple[str, FakeRuntime]] = []
        self.bases = BasesInMemory()

    def read(self, settings: Settings, folder: Path, adapter: Any) -> Any:
        return SimpleNamespace(folder=folder)

    def read_ahead(self, folder: Path, name: str) -> None:
        """There are none."""

    def first_steps(self, settings: Settings, model: str, listener: Any) -> Generator[float, None, LoadedRuntime]:
        return self.steps(settings, None, model, Weights(), listener, ())

    def steps(
        self, settings: Settings, found: Any, model: str, weights: Weights, listener: Any, pinned: Any
    ) -> Generator[float, None, LoadedRuntime]:
        yield 0.0
        runner = Runner(answer=10**9) if model == DEFAULT_KEY else FakeRunner(answer=ANSWER)
        runtime = LoadedRuntime(runner, Path(settings.model_path or ""))
        self.made.append((model, runtime))
        try:
            yield 0.0
            self.last_step()
        except BaseException:
            runtime.close()
            raise
        return runtime

    def last_step(self) -> None:
        """On the model thread."""


class LoadedRuntime(FakeRuntime):
    def __init__(self, runner: FakeRunner, folder: Path) -> None:
        super().__init__(runner)
        self.loaded = SimpleNamespace(source=str(folder), folder=folder, weights=Weights(10), model=Mock())
        self.store, self.grammars = Mock(), Mock()
        self.store.unguarded.resident.nbytes = 0


def make_handle(settings: Settings, clients: Any, runtime: Any, model: str, anchor: Any, publish: Any) -> Any:
    """Stands for `handles.make_handle`."""
    name = settings.served_model_name or "main"
    return SimpleNamespace(
        name=name, source=name, model=model, recorder=Pipeline(), pipeline=Pipeline(), token_text=lambda token: "x"
    )


def card_of(settings: Settings, handle: Any, loaded: Any, base: str) -> ModelCard:
    return ModelCard(handle.name, 0, 100, tools=False, reasoning=False)


@dataclass
class Life:
    """One pool's life, with the request that runs all the time.

    Attributes:
        told: what each part of the script said, or its error.
    """

    cache: Path
    told: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = load_settings(
            None, model_path=str(self.cache / "main"), start_llm_cache_dir=self.cache, trust_remote_code=True
        )
        settings = settings.model_copy(update={"max_loaded_models": 2})
        self.builder = Builder()
        self.registry = ModelRegistry(settings, NameResolver(settings))
        self.engine = EngineThread(max_queue=9, max_concurrency=4)
        builder: Any = self.builder
        loader = Loader(self.registry, self.engine, builder, Clients(), self.say)
        self.pool = Pool(self.registry, self.engine, builder, loader)
        self.engine.start()
        self.pool.start_loading()
        self.main = self.pool.open("default")
        work, self.running = submit("main", PROMPT, max_tokens=10**9)
        self.engine.submit(work)

    def say(self, line: str) -> None:
        self.hear(line)

    def hear(self, line: str) -> None:
        """Nobody listens."""

    def attempt(self, name: str, part: Callable[[], Any]) -> None:
        """As an HTTP thread does: what is raised is told to one client."""
        try:
            self.told[name] = part()
        except Exception as error:  # noqa: BLE001 - as it does
            self.told[name] = error

    def ask(self, model: str) -> list[int]:
        """The model's answer."""
        lease = self.pool.open(model)
        try:
            assert lease.wait(WAIT), "nobody tells who waits"
            work, sink = submit(f"asked-{threading.get_ident()}-{time.monotonic_ns()}", PROMPT, max_tokens=10**9)
            self.engine.submit(replace(work, model=lease.handle.model))
            ended = final(sink)
            assert isinstance(ended, EngineDone), ended
            return sink.tokens
        finally:
            lease.close()

    def live_for(self, seconds: float) -> None:
        """Changes the time to live of all models."""
        for entry in list(self.registry._entries.values()):
            entry.settings = entry.settings.model_copy(update={"model_ttl_seconds": seconds})

    def gone(self, model: str) -> str:
        """Once the model has gone, or could not be loaded before."""
        until(lambda: self.pool.card(model).state in {"stored", "failed"})
        return "gone"

    def reclaim(self) -> str:
        """Memory is short, and the model thread asks for one byte more."""
        self.engine.call(lambda _: self.registry.reclaim(1), WAIT)
        return self.gone("three")

    def unload(self, model: str) -> str:
        self.pool.unload(model)
        return self.gone(model)

    def pinned(self, pinned: bool) -> bool:
        return self.pool.pin("two", pinned).pinned

    def names(self) -> str:
        assert self.pool.token_text(1, "three") in ("", "x")
        return self.pool.served_name("three")

    def close(self) -> None:
        self.main.close()
        assert self.engine.stop(WAIT)
        self.pool.stop()


def play(life: Life) -> None:
    life.attempt("two", lambda: life.ask("two"))
    life.attempt("three, for which two has to go", lambda: life.ask("three"))
    life.attempt("memory", life.reclaim)
    life.attempt("two again", lambda: life.ask("openai/two"))
    life.attempt("by hand", lambda: life.unload("two"))
    for pinned in (True, False):
        life.attempt(f"pinned: {pinned}", partial(life.pinned, pinned))
    life.attempt("three again", lambda: life.ask("three"))
    life.attempt("models", lambda: [card.id for card in life.pool.cards()][:1])
    life.attempt("names", life.names)
    life.attempt("figures", lambda: sorted(life.pool.figures()))
    life.live_for(1e-9)
    life.attempt("by age", lambda: life.gone("three"))
    life.live_for(0.0)


METHODS: dict[Any, tuple[str, ...]] = {
    ModelRegistry: (*("entries", "entry", "lease", "order", "evict_idle", "reclaim", "take", "ready", "residents"),),
    RoomQueue: ("look_again", "end_waits", "remove"),
    ModelLease: ("settle",),
    NameResolver: ("find", "all", "is_pinned", "settings_for"),
    Builder: ("read", "steps", "last_step"),
    EngineThread: ("load", "unload"),
    Pipeline: ("close", "counters"),
    Life: ("hear",),
    loader: ("room_for",),
    kinds: ("make_handle",),
    registry: ("to_free", "outlived"),
}


@contextmanager
def watched(on_call: Callable[[Site], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in METHODS.items():
            for name in names:
                patch.setattr(owner, name, wrapped(getattr(owner, name), f"{owner.__name__}.{name}", on_call))
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    build_oracle(folder / "main")
    for name in ("two", "three"):
        shutil.copytree(folder / "main", folder / "models" / name)
    return folder


def lived(cache: Path, on_call: Callable[[Site], None]) -> Life:
    """A life, and afterwards: each model answers, as it did."""
    life = Life(cache)
    try:
        with watched(on_call):
            play(life)
        for model in ("two", "three"):
            life.told[f"afterwards, {model}"] = life.ask(model)
        count = len(life.running.tokens)
        until(lambda: len(life.running.tokens) > count, "the main model's request does not go on")
        assert life.running.final is None
        ready = {entry.key for entry in life.registry.entries() if entry.state == "ready"}
        assert set(life.engine._loop.models._models) == ready
        closed = [runtime for key, runtime in life.builder.made if runtime.closed_on is not None]
        assert len(closed) == len(life.builder.made) - len(ready), "a model that has gone holds its memory"
    finally:
        life.close()
    return life


def test_a_fault_anywhere_in_the_pool_is_told_to_one_client(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(kinds, "make_handle", make_handle)
    monkeypatch.setattr(kinds, "card_of", card_of)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(registry, "RETRY_SECONDS", 0.0)
    sites: dict[Site, None] = {}
    plain = lived(cache, lambda site: sites.setdefault(site))
    assert not [told for told in plain.told.values() if isinstance(told, Exception)], plain.told
    seen = {name for name, _ in sites}
    assert {f"{owner.__name__}.{name}" for owner, names in METHODS.items() for name in names} == seen
    chosen = list(sites) if request.config.getoption("--slow") else list(sites)[::3]
    for fault in chosen:
        raised: list[Site] = []

        def on_call(site: Site, fault: Site = fault, raised: list[Site] = raised) -> None:
            if site == fault and not raised:
                raised.append(site)
                raise RuntimeError("a fault")

        try:
            life = lived(cache, on_call)
        except BaseException as error:
            raise AssertionError(f"{fault}: {error}") from error
        assert raised, fault
        failed = [name for name, told in life.told.items() if isinstance(told, Exception)]
        assert len(failed) <= 1 and not any("afterwards" in name for name in failed), (fault, failed, life.told)
        for name, told in life.told.items():
            assert name in failed or told == plain.told[name], (fault, name)
        both = min(len(life.running.tokens), len(plain.running.tokens))
        assert life.running.tokens[:both] == plain.running.tokens[:both], fault
