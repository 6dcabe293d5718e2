"""Conversations with a model whose head drafts: the words are those without it, and what is restored has its KV.

``HEADED_TURNS=1000`` runs more of them, ``HEADED_SEED=5`` others.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.draft import DecodeCounts
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import FixedMemory, scheduler_on, submit
from tests.engine.lookups import QUESTIONS, learnt, lookups
from tests.engine.schedule.test_scheduler import drain
from tests.models.architectures import greedy

pytestmark = pytest.mark.thorough

TURNS, SEED = int(os.environ.get("HEADED_TURNS", "40")), int(os.environ.get("HEADED_SEED", "21"))
SAID = 16
ROW_BYTES = 1 << 16  # of a row of some hundred tokens, about
NEVER = 10**9
COSTS = {1: 1.0, 3: 1.05, 4: 3.0, 32: 30.0}  # two tokens are drafted at most: so many the head has learnt to guess


class Server:
    """One model, its store and its scheduler; `close` and a new one on the same folder is a restart."""

    def __init__(self, folder: Path | None = None, budget: int = 1 << 28) -> None:
        self.model = learnt()
        self.drafts = Drafts(DraftGate(Published(COSTS), carries=True, head=0.05))
        disk = None if folder is None else DiskTier(folder, "headed", 1 << 30)
        config = StoreConfig(budget_bytes=budget)
        self.store = GuardedStore(KVStore(LayerKit(self.model.make_cache), config, disk=disk), self.model.make_cache)
        self.plain_restore = self.store.restore
        self.store.restore = self.restore  # type: ignore[method-assign]
        self.runner = ModelRunner(self.model, eos=[NEVER], max_rows=2, gate=self.drafts.gate)
        self.counts = DecodeCounts()
        self.scheduler = scheduler_on(self.runner, self.store, 2, FixedMemory(0, 1 << 30), drafts=self.drafts, step=48)

    def restore(self, tokens: Any, plan: Any) -> Any:
        found = self.plain_restore(tokens, plan)
        assert all(leaf.offset == found.length for leaf in self.model._layers_of(found.cache))
        return found

    def add(self, name: str, prompt: list[int], **sampling: Any) -> Any:
        work, sink = submit(name, prompt, max_tokens=SAID)
        drawn = Sampling(temperature=0, **sampling) if "temperature" not in sampling else Sampling(**sampling)
        self.scheduler.add(replace(work, session=name, sampling=drawn))
        return sink

    def close(self) -> None:
        for _ in self.store.leave(60):
            time.sleep(0.01)
        self.runner.close()
        self.store.close()
        self.drafts.close()


@cache
def words(prompt: tuple[int, ...]) -> list[int]:
    """What the model says without a head, one token a pass."""
    return greedy(learnt()._model, prompt, SAID)


def opening(seed: int, length: int) -> list[int]:
    """A table, and so many tokens."""
    return [int(token) for token in lookups(mx.random.key(seed), 1, QUESTIONS + length)[0].tolist()]


def test_the_words_are_the_same_over_forks_restarts_evictions_cancels_and_second_rows(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    server = Server(tmp_path, budget=6 * ROW_BYTES)
    histories: list[list[int]] = [opening(1, 36)]
    reused = 0
    headed = 0
    for turn in range(TURNS):
        prompts = []
        for _ in range(chance.choice([1, 1, 2])):
            base = chance.choice(histories[-6:])
            kept = base[: chance.randrange(8, len(base) + 1)] if chance.random() < 0.3 else base
            prompts.append([*kept, *opening(100 + turn, chance.randrange(5))][-240:])
        sinks = [server.add(f"{turn}.{i}", prompt) for i, prompt in enumerate(prompts)]
        if chance.random() < 0.15:
            for _ in range(chance.randrange(1, 8)):
                server.scheduler.step()
            server.scheduler.requests.cancel(f"{turn}.0")
        drain(server.scheduler)
        for prompt, sink in zip(prompts, sinks, strict=True):
            said = list(sink.tokens)
            assert said == words(tuple(prompt))[: len(said)], f"turn {turn}"
            histories.append([*prompt, *said])
            reused += sink.events[-1].report.reused
            headed += sink.events[-1].report.headed
        if chance.random() < 0.1:
            server.close()
            server = Server(tmp_path, budget=6 * ROW_BYTES)
    server.close()
    print(f"{TURNS} turns, {reused} tokens reused, {headed} proposed by the head")
    assert reused > 20 * TURNS and headed > TURNS


def right_guesses(cache: list[Any], prompt: list[int]) -> float:
    """The share of the head's guesses, one behind each token of the answer, that were right. `cache`: of the prompt.

    The answer is followed until a question comes a second time.
    """
    model, said, right = learnt(), words(tuple(prompt))[: 2 * QUESTIONS], 0
    for place, token in enumerate(said[:-1]):
        guess = model.propose(cache, [token], None, 1, lambda logprobs: mx.argmax(logprobs, axis=-1))
        right += guess == said[place + 1 : place + 2]
        model(mx.array([[token]]), cache=cache)
    return right / (len(said) - 1)


def test_a_head_is_as_good_after_a_hit_as_in_a_cold_run_and_worse_unprimed() -> None:
    model = learnt()
    kit = LayerKit(model.make_cache)
    cold, hit, unprimed = list[float](), list[float](), list[float]()
    for seed in range(24):
        prompt = opening(10**6 + seed, 5)
        stored = QUESTIONS + 4  # the table, and two questions with their answers
        cache = model.make_cache()
        model(mx.array([prompt[:stored]]), cache=cache)
        packed = [kit.unpack(*kit.pack(piece)) for piece in (kit.slice(cache, 0, stored), kit.checkpoint(cache))]
        restored, bare = (kit.build(packed[:1], packed[1], stored)[0] for _ in range(2))  # type: ignore[arg-type]
        bare[-2:-1] = model.drafter.make_cache()
        for found, caches in ((cold, cache), (hit, restored), (unprimed, bare)):
            model(mx.array([prompt[stored:]]), cache=caches)
            found.append(right_guesses(caches, prompt))
    shares = [sum(each) / len(each) for each in (cold, hit, unprimed)]
    print("right: {:.3f} cold, {:.3f} after a hit, {:.3f} without the restored KV of the head".format(*shares))
    assert shares[0] > 0.9 and abs(shares[1] - shares[0]) <= 0.02 and shares[2] < 0.8
