"""Who waits for which model, and who waits no more. No model is loaded here."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest

from start_llm.core.errors import (
    NOT_LOADABLE,
    BadRequest,
    NotFound,
    NotSupported,
    OutOfMemory,
    StartLLMError,
    Unavailable,
)
from start_llm.core.service import ModelCard
from start_llm.core.settings import load_settings
from start_llm.core.work import EngineStatus
from start_llm.engine.loop import SHUTTING_DOWN
from start_llm.engine.watchdog import Watchdog
from start_llm.modelpool.cards import all_cards
from start_llm.modelpool.kinds import LoadProgress
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.pool import Pool
from start_llm.modelpool.registry import Event, ModelLease, ModelRegistry, PoolEntry, State
from start_llm.modelpool.resolve import KnownModel, NameResolver
from start_llm.models.adapter import StoredAdapter
from start_llm.models.catalog import StoredModel
from start_llm.models.room import Weights
from tests.waiting import until


def make_registry(folder: Path, **settings: Any) -> ModelRegistry:
    given = load_settings(None, start_llm_cache_dir=folder, **settings)
    return ModelRegistry(given, NameResolver(given))


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return make_registry(tmp_path)


def make_loader(registry: ModelRegistry, status: EngineStatus | None = None) -> Loader:
    builder = Mock(**{"shared.usable": 0, "shared.running": 0})
    engine = Mock(**{"status.return_value": status or EngineStatus("ready"), "watched.return_value": 0.0})
    return Loader(registry, engine, builder, Mock(), Mock())


def make_pool(folder: Path, say: Any = None, weight_bytes: int = 0, **settings: Any) -> Pool:
    registry = make_registry(folder, **settings)
    builder = Mock(**{"shared.weight_bytes": weight_bytes, "shared.running": 2, "shared.usable": 20})
    engine = Mock(**{"watched.return_value": 0.0})
    return Pool(registry, engine, builder, Loader(registry, engine, builder, Mock(), say))


def known(name: str, size: int = 1000, key: str = "") -> KnownModel:
    stored = StoredModel(name, Path("/nowhere") / name, size, 4096, (), weight_bytes=size)
    return KnownModel(key or f"/nowhere/{name}", name, name, frozenset({name}), stored)


def refusal(lease: ModelLease) -> str:
    """Why it was given up; empty if it waits."""
    if not lease.wait(0):
        return ""
    with pytest.raises((OutOfMemory, Unavailable)) as error:
        _ = lease.handle
    return str(error.value)


def short(registry: ModelRegistry, name: str, leases: int) -> tuple[PoolEntry, list[ModelLease]]:
    waiting = [registry.lease(known(name)) for _ in range(leases)]
    entry = registry.entry(known(name))
    registry.room.add(entry, OutOfMemory(f"no room for {name}"))
    return entry, waiting


def test_its_own_file_is_read_when_a_model_is_loaded_and_no_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry, waited = make_registry(tmp_path), list[bool]()
    loader, entry = make_loader(registry), registry.entry(known("own"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.toml").write_text("ttl = 7\n")
    for name in ("settings_for", "is_pinned"):
        read = getattr(registry.names, name)
        look = Mock(side_effect=lambda model, read=read: waited.append(registry.lock._is_owned()) or read(model))  # type: ignore[attr-defined]
        monkeypatch.setattr(registry.names, name, look)
    registry.lease(known("own"))
    registry.lease(known("another"))
    registry.entry(known("one more"))
    loader._load(entry)
    assert entry.settings.model_ttl_seconds == 7 and set(waited) == {False} and len(waited) >= 3


def test_those_that_wait_for_room_never_keep_more_than_half_of_the_threads(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, http_threads=8, pool_wait_seconds=1000)
    first, some = short(registry, "first", 3)
    second, more = short(registry, "second", 3)
    assert [refusal(lease) for lease in some] == ["", "", ""]
    assert [refusal(lease) for lease in more] == ["", "no room for second", "no room for second"]
    assert registry.room.entries == [first, second]
    late = registry.lease(known("first"))
    registry.room.end_waits()
    assert refusal(late) == "" and refusal(more[0]) == "no room for second", (
        "the model that is waited for longest comes first"
    )
    assert registry.room.entries == [first] and second.state == "stored"


def test_each_waits_for_its_own_time(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, pool_wait_seconds=1000)
    entry, (old, young) = short(registry, "one", 2)
    old.since -= 1001
    registry.room.end_waits()
    assert refusal(old) == "no room for one" and refusal(young) == "" and registry.room.entries == [entry]
    young.since -= 1001
    registry.room.end_waits()
    assert refusal(young) and registry.room.entries == [] and entry.state == "stored"
    for lease in (old, young):
        lease.close()
    assert entry.users == 0


def test_a_load_hangs_only_while_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, never = 0.0, lambda: None
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept, time=time.time)
    monkeypatch.setattr("start_llm.engine.watchdog.time", clock)
    dog = Watchdog(600.0, time.monotonic, lambda: 0, wedged=never, hopeless=never)
    progress = LoadProgress(30.0, lambda: dog.watched)
    dog.start()
    progress.begin("tiny")
    until(lambda: dog.watched > 0)
    slept, before = 1000.0, dog.watched
    until(lambda: dog.watched > before)
    assert progress.stuck() is None
    progress.limit = 1e-9
    assert "tiny is being loaded" in str(progress.stuck())
    progress.end()
    assert progress.stuck() is None
    dog.stop()


def test_what_is_done_for_a_model_that_is_loaded_stands_on_its_card_alone() -> None:
    progress = LoadProgress(30.0, time.monotonic)
    one, other = (ModelCard(name, 0, 8, state="loading") for name in ("one", "other"))
    assert progress.shown(one) is one
    progress.begin("one")
    progress.told("reading one, 7.1 GB", 0.25)
    assert progress.shown(one).details == {"loading": {"step": "reading one, 7.1 GB", "part": 0.25}}
    assert progress.shown(other) is other
    assert progress.shown(replace(one, state="ready")).details == {}
    progress.told("reading one, 7.1 GB", 1.0)
    assert progress.shown(one) is one


def test_a_lease_that_is_closed_lets_the_next_one_look_again(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, pool_wait_seconds=1000)
    entry, _ = short(registry, "one", 1)
    while not registry.load_queue.empty():
        registry.load_queue.get()
    other = registry.lease(known("other"))
    assert registry.load_queue.get(timeout=60) is registry.entry(known("other"))
    other.close()
    assert registry.load_queue.get(timeout=60) is entry


@pytest.mark.parametrize("state", ["", "wedged", "failed", "stopped"])
def test_nobody_waits_for_a_loader_that_hangs_or_a_model_thread_that_will_not_answer(
    registry: ModelRegistry, state: str
) -> None:
    waiting = registry.lease(known("one"))
    if state:
        make_loader(registry, EngineStatus(state, detail="it is gone"))
    else:
        registry.stuck = lambda: Unavailable("it is gone")
    assert refusal(waiting) == "it is gone"
    with pytest.raises(Unavailable, match="it is gone"):
        registry.lease(known("two"))
    assert registry.entry(known("two")).users == 0


def test_what_is_not_on_the_disk_is_forgotten_and_other_files_are_measured_anew(registry: ModelRegistry) -> None:
    gone, there = registry.entry(known("gone")), registry.entry(known("there", 1000))
    assert registry.entry(known("there", 5000)) is there and there.weights.all == 5000
    registry.forget([known("there")])
    assert registry.entries() == [registry.default, there]
    assert registry.entry(known("gone")) is not gone


def test_the_main_model_goes_by_its_own_time_to_live_alone(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, model_ttl_seconds=3600)
    main, other = registry.default, registry.entry(known("other"))
    for entry in (main, other):
        entry.state, entry.used = "ready", time.monotonic() - 4000
    registry.evict_idle(600)  # as under pressure
    assert (main.state, other.state) == ("ready", "unloading")
    registry.evict_idle()
    assert main.state == "unloading"


def test_a_loaded_model_goes_when_its_name_has_become_another_ones(registry: ModelRegistry) -> None:
    before = registry.entry(known("mine", key="/nowhere/a"))
    before.state = "ready"
    registry.forget([])
    assert before.state == "ready", "who deletes a model may go on with it"
    lease_on_it = before.users = 1
    registry.forget([known("mine", key="/nowhere/b")])
    assert lease_on_it and before.state == "ready"
    before.users = 0
    registry.forget([known("mine", key="/nowhere/b")])
    assert before.state == "unloading" and registry.load_queue.get(timeout=60) is before


def test_who_still_waits_when_the_server_ends_is_refusal(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    waiting = [pool._registry.lease(known(name)) for name in ("one", "two")]
    pool.stop()
    assert [refusal(lease) for lease in waiting] == [SHUTTING_DOWN] * 2


def test_a_model_that_could_not_be_loaded_is_in_nobody_s_way(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, pool_wait_seconds=1000)
    loader = make_loader(registry)
    first, _ = short(registry, "first", 1)
    second, _ = short(registry, "second", 1)
    loader._failed(first, RuntimeError("a fault"))
    assert registry.room.entries == [second] and first.state == "stored"


def test_nobody_takes_the_place_that_another_one_has_waited_for(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, max_loaded_models=2, pool_wait_seconds=1000)
    loader = make_loader(registry)
    busy, idle = (registry.entry(known(name)) for name in ("busy", "idle"))
    busy.state = idle.state = "ready"
    busy.users = idle.users = 1
    for name in ("first", "second"):
        registry.lease(known(name))
    first, second = (registry.entry(known(name)) for name in ("first", "second"))
    assert loader._room(first) is None
    idle.users = 0
    assert loader._room(second) is None and registry.room.entries == [first, second]
    assert "waits for memory behind first" in registry.room.lacks[second].message
    assert loader._room(first) == [idle.key]
    registry.room.remove(first)
    assert loader._room(second) == [idle.key]


def test_what_is_leaving_already_counts_for_who_needs_memory(registry: ModelRegistry) -> None:
    """A request asks again and again until it has its memory: that must not send everybody away."""
    old, young = (registry.entry(known(name)) for name in ("old", "young"))
    old.state = young.state = "ready"
    old.used, young.used = 1.0, 2.0
    assert registry.reclaim(900) and (old.state, young.state) == ("unloading", "ready")
    assert registry.reclaim(1000) and young.state == "ready"
    assert not registry.reclaim(2001) and young.state == "ready"
    assert registry.reclaim(1001) and young.state == "unloading"


def test_a_model_whose_name_is_another_one_now_is_loaded_anew_under_it(registry: ModelRegistry) -> None:
    """Two links led to one folder, and the first of them was taken away."""
    entry = registry.entry(known("first", key="/nowhere/a"))
    entry.state, entry.users, entry.card = "ready", 1, Mock(id="first")
    second = known("second", key="/nowhere/a")
    registry.forget([second])
    assert entry.state == "ready" and entry.name == "first", "a request goes on with what it began with"
    entry.users = 0
    registry.forget([second])
    assert entry.state == "unloading" and registry.load_queue.get(timeout=60) is entry
    assert entry.name == "second" and entry.settings.served_model_name == "second"
    assert registry.entry(second) is entry


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (BadRequest("The adapter 'titles' does not fit."), None),
        (NotFound("Its files are gone."), NOT_LOADABLE),
        (NotSupported("No such architecture."), NOT_LOADABLE),
        (RuntimeError("a fault"), NOT_LOADABLE),
        (OutOfMemory("It does not fit."), "out_of_memory"),
        (Unavailable("The server is ending."), None),
    ],
)
def test_only_a_sound_request_is_one_that_another_model_could_answer(
    registry: ModelRegistry, error: Exception, refusal: str | None
) -> None:
    loader = make_loader(registry)
    lease = registry.lease(known("a"))
    loader._failed(registry.entry(known("a")), error)
    with pytest.raises(StartLLMError) as told_first:
        lease.check()
    assert told_first.value.refusal == refusal
    if not isinstance(error, OutOfMemory | Unavailable):
        with pytest.raises(StartLLMError, match="is tried again in") as told_again:
            registry.lease(known("a"))
        assert told_again.value.refusal == refusal


def test_a_name_is_looked_up_again_before_a_load_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(tmp_path)
    pool._registry.default.card = Mock()
    first, second = known("mine", key="/nowhere/a"), known("mine", key="/nowhere/b")
    looks = Mock()
    monkeypatch.setattr(pool._names.listing, "look_again", looks)
    for find in ("find", "find_chat", "find_audio"):
        monkeypatch.setattr(pool._names, find, lambda *_: second if looks.called else first)
    for ask in (lambda: pool.open("mine"), lambda: pool.open_any("mine"), lambda: pool.open_audio("mine", "speech")):
        looks.reset_mock()
        pool._registry.entry(first).state = pool._registry.entry(second).state = "stored"
        assert ask()._entry.key == "/nowhere/b" and looks.call_count == 1
        assert pool._registry.entry(first).state == "stored"
        looks.reset_mock()
        for state in ("ready", "loading"):
            pool._registry.entry(first).state = state
            assert ask()._entry.key == "/nowhere/a" and not looks.called


def test_audio_models_are_loaded_at_the_start_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    pool = make_pool(tmp_path, said.append, weight_bytes=7, preload_models="tiny")
    registry = pool._registry
    stored = StoredModel("tiny", tmp_path / "tiny", 1000, None, ("transcription",), weight_bytes=40)
    tiny = KnownModel("/nowhere/tiny", "tiny", "tiny", frozenset({"tiny"}), stored)
    monkeypatch.setattr(pool._names, "find", {"tiny": tiny}.get)

    def load_default() -> None:
        first = registry.load_queue.get_nowait()
        assert first is registry.default and first.state == "loading"
        handle = Mock(**{"pipeline.counters.return_value": {"turns": 3}})
        registry.ready(first, handle, Weights(5), Mock(), Mock(id="main"))

    monkeypatch.setattr(pool._loader, "start", load_default)
    pool.start_loading()
    wanted = registry.load_queue.get_nowait()
    assert said == [] and wanted is not None and wanted.name == "tiny" and wanted.state == "loading"
    counted = {"prompt_turns": 3, "models_loaded": 1, "models_weight_bytes": 7}
    assert pool.figures() == counted | {"models_memory_bytes": 20, "kv_running_bytes": 2}
    assert wanted.weights == Weights(40)
    registry.ready(wanted, Mock(nbytes=50), Weights(50))
    assert wanted.weights == Weights(50)
    assert pool.figures()["models_loaded"] == 2


def test_nothing_asks_the_disk_while_the_book_is_locked(
    tmp_path: Path, registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang, and every request needs the book."""
    adapter = StoredAdapter("titles", tmp_path / "titles", "", 10, "stamp")
    monkeypatch.setattr("os.path.realpath", Mock(side_effect=AssertionError("the disk was asked")))
    plain = registry.entry(known("one", 1000)).weights
    adapted = registry.entry(known("one", 1000).with_adapter(adapter)).weights
    assert plain.group == adapted.group == "/nowhere/one" and (plain.all, adapted.own) == (1000, 10)
    assert registry.entry(known("one", 5000)).weights.all == 5000


ALLOWED = {
    ("stored", "wanted"): "loading",
    ("loading", "loaded"): "ready",
    ("loading", "failed"): "stored",
    ("loading", "unwanted"): "stored",
    ("ready", "evicted"): "unloading",
    ("ready", "failed"): "stored",
    ("unloading", "evicted"): "unloading",
    ("unloading", "unloaded"): "stored",
    ("unloading", "failed"): "stored",
}


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("event", get_args(Event))
def test_a_state_changes_as_the_table_says_and_in_no_other_way(tmp_path: Path, state: State, event: Event) -> None:
    entry = make_registry(tmp_path).entry(known("one"))
    entry.state = state
    if (state, event) in ALLOWED:
        entry.move(event)
        assert entry.state == ALLOWED[state, event]
    else:
        with pytest.raises(KeyError):
            entry.move(event)
        assert entry.state == state


def test_a_lease_that_is_closed_holds_no_arrays(registry: ModelRegistry) -> None:
    lease = registry.lease(known("one"))
    registry.ready(registry.entry(known("one")), Mock(), Weights(1))
    assert lease.handle is registry.entry(known("one")).handle
    lease.close()
    with pytest.raises(Unavailable, match="given up"):
        _ = lease.handle


def test_an_encoder_takes_no_part_in_who_goes_for_whom(tmp_path: Path) -> None:
    """Its memory is set aside: it fits wherever the server has started, and no listing makes it forgotten."""
    pool = make_pool(tmp_path, max_loaded_models=1)
    registry, lease = pool._registry, pool.open_encoder("tiny", tmp_path)
    entry = registry.load_queue.get_nowait()
    assert entry is not None and pool._loader._room(entry) == []
    registry.ready(entry, Mock(nbytes=0), Weights(0))
    registry.forget([])
    assert lease.handle is entry.handle and entry in registry.entries()
    assert registry.residents() == [] and pool.figures()["models_loaded"] == 0 and all_cards(registry)[1:] == ()
