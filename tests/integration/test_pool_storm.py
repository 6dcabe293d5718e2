"""Many clients, three models, room for two: nothing wrong, nothing twice, nothing left behind."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from tests.integration.live import WAIT, Live
from tests.integration.pooled import BUDGET_FOR_TWO, ORACLES, SMOL, admin, link_smol, states
from tests.oracle import expected_truth
from tests.unique import unique
from tests.waiting import until

PATIENCE = 10 * WAIT
SLACK_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Turn:
    """A question that was answered. `messages`: all that was sent with it."""

    messages: list[dict[str, Any]]
    answer: str
    computed: int
    new: int


@dataclass
class Storm:
    """
    Attributes:
        talks: the turns of each client with each model.
        full: how often a model was refused with 507.
        wrong: everything that should not have been.
        loads: how often each model was loaded, and the most models that were loaded at a time.
        weights: of each model that was loaded.
    """

    talks: dict[tuple[int, str], list[Turn]] = field(default_factory=dict)
    full: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    loads: Counter[str] = field(default_factory=Counter)
    most_loaded: int = 0
    weights: list[weakref.ref[Any]] = field(default_factory=list)

    def turns(self, name: str) -> list[Turn]:
        return [turn for (_, model), turns in self.talks.items() if model == name for turn in turns]


def ask(server: Live, name: str, messages: list[dict[str, Any]]) -> httpx.Response:
    body = {"model": name, "messages": messages} | ({} if name in ORACLES else {"max_tokens": 4})
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)


def turn_of(messages: list[dict[str, Any]], data: dict[str, Any]) -> Turn:
    report = data["usage"]["start_llm"]
    return Turn(messages, data["choices"][0]["message"]["content"], report["computed"], max(report["new"], 1))


def rage(server: Live, requests: int, clients: int, names: tuple[str, ...]) -> Storm:
    """Random requests of several clients, each with a conversation per model."""
    storm = Storm(talks={(number, name): [] for number in range(clients) for name in names})

    def client(number: int) -> None:
        chance = random.Random(number)
        for _ in range(requests // clients + (number < requests % clients)):
            name, words = chance.choice(names), chance.randint(50, 300)
            turns = storm.talks[number, name]
            asked = {"role": "user", "content": f"{unique()} {'word ' * words} [[truth]]"}
            history = [*turns[-1].messages, {"role": "assistant", "content": turns[-1].answer}] if turns else []
            response = ask(server, name, [*history, asked])
            data = response.json()
            if response.status_code == 507:
                storm.full[name] += 1
                continue
            if response.status_code != 200:
                storm.wrong.append((response.status_code, data))
                return
            turn = turn_of([*history, asked], data)
            right = name not in ORACLES or turn.answer == expected_truth(server.prompts[data["id"]])
            if data["model"] != name or not right:
                storm.wrong.append((name, data["model"], turn.answer))
                return
            turns.append(turn)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    with counted_loads(server, storm):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return storm


@contextmanager
def counted_loads(server: Live, storm: Storm) -> Iterator[None]:
    load, ready = server.app.engine.load, server.app.pool._registry.ready

    def noted(entry: Any, handle: Any, weights: Any, runtime: Any, card: Any) -> None:
        storm.weights.append(weakref.ref(runtime.loaded.model))
        ready(entry, handle, weights, runtime, card)

    def counted(model: str, steps: Any) -> Any:
        storm.loads[Path(model).name] += 1
        storm.most_loaded = max(storm.most_loaded, int(server.app.pool.figures()["models_loaded"]) + 1)
        return load(model, steps)

    server.app.engine.load = counted  # type: ignore[method-assign]
    server.app.pool._registry.ready = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.app.engine.load = load  # type: ignore[method-assign]
        server.app.pool._registry.ready = ready  # type: ignore[method-assign]


def check(server: Live, storm: Storm, names: tuple[str, ...]) -> None:
    """No wrong answer, never three models, and of each model nothing was computed twice."""
    assert not storm.wrong, storm.wrong[:3]
    print(f"loads {dict(storm.loads)}, 507 {dict(storm.full)}")
    for name in names:
        ratios = [turn.computed / turn.new for turn in storm.turns(name)]
        assert ratios, f"{name} never answered"
        mean = sum(ratios) / len(ratios)
        print(f"{name}: {len(ratios)} answers, computed / new {mean:.3f}, most {max(ratios):.3f}")
        assert mean <= 1.05
    assert storm.most_loaded <= 2
    status = server.app.engine.status()
    assert (status.running, status.queued) == (0, 0)


def replay(server: Live, storm: Storm, name: str, clients: range) -> None:
    """The same conversations once more, one after the other: the same answers, and no less work than in the storm."""
    alone = together = 0
    for number in clients:
        for turn in storm.talks[number, name]:
            again = turn_of(turn.messages, ask(server, name, turn.messages).json())
            assert again.answer == turn.answer or name in ORACLES, (name, number, again.answer, turn.answer)
            alone, together = alone + again.computed, together + turn.computed
    print(f"{name}: {together} tokens computed in the storm, {alone} alone")
    assert together <= 1.05 * alone


def active_bytes(server: Live) -> int:
    """What MLX holds."""

    def look() -> Generator[float, None, int]:
        yield 0.0
        return int(mx.get_active_memory())

    return int(server.app.engine.chore(look()))


def only_the_main_model_anew(server: Live, names: tuple[str, ...]) -> int:
    """All models out, the main one in again: the bytes that MLX then holds."""
    for name in names:
        until(lambda name=name: admin(server, "unload", model=name).status_code == 200)  # type: ignore[misc]
    assert set(states(server).values()) == {"stored"}
    assert admin(server, "load", model=names[0]).status_code == 200
    return active_bytes(server)


def threads_of_models() -> Counter[str]:
    """Threads that belong to a loaded model, by kind."""
    names = (thread.name.rstrip("0123456789").rstrip("-_") for thread in threading.enumerate())
    return Counter(name for name in names if name in {"kv-disk", "drafts", "recorder", "turns", "grammar"})


def weather(server: Live, requests: int, clients: int, names: tuple[str, ...]) -> Storm:
    """A storm that leaves nothing behind."""
    before, threads = only_the_main_model_anew(server, names), threads_of_models()
    storm = rage(server, requests, clients, names)
    check(server, storm, names)
    assert min(storm.loads[name] for name in names[1:]) >= 1, "each was swapped in"
    after = only_the_main_model_anew(server, names)
    print(f"the main model alone: MLX holds {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after")
    assert after <= before + SLACK_BYTES
    assert not any(each() is not None for each in storm.weights), "of small models no byte tells"
    until(lambda: threads_of_models() <= threads)
    return storm


@pytest.mark.thorough
def test_random_requests_over_three_models_in_a_budget_for_two(serve: Callable[..., Any]) -> None:
    with serve(pool_memory_bytes=BUDGET_FOR_TWO) as server:
        weather(server, 24, 4, ORACLES)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_500_random_requests_over_two_oracles_and_smollm2(
    serve: Callable[..., Any], smol_path: Path, tmp_path: Path
) -> None:
    """Twenty minutes on two busy cores, with OpenBLAS preloaded; STORM_REQUESTS for fewer."""
    weights = link_smol(tmp_path, smol_path)
    names = ("oracle-plain", "oracle-hybrid", SMOL)
    with serve(pool_memory_bytes=BUDGET_FOR_TWO + weights) as server:
        storm = weather(server, int(os.environ.get("STORM_REQUESTS", "500")), 8, names)
    with serve(tmp_path / "alone") as fresh:
        link_smol(tmp_path / "alone", smol_path)
        for name in names:
            replay(fresh, storm, name, range(2))
