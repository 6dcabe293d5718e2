"""What a continuing turn takes: its KV once, and a layer of it that moves."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.head import HeadedModel, SmallModel
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.quantised import Quantisation
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import FixedMemory, scheduler_on, submit
from tests.engine.schedule.test_scheduler import drain
from tests.models.architectures import make

LAYERS, WIDTH = 8, 256
HISTORY, NEW, SAID = 1100, 20, 8
BUDGET = 4 << 30
NEVER = 10**9  # no token ends an answer


def of_layers(kinds: list[str]) -> Any:
    one = {"num_attention_heads": 1, "head_dim": WIDTH, "sliding_window": 64, "vocab_size": 256}
    return make("llama", num_hidden_layers=len(kinds), layer_types=kinds, **one)


@dataclass
class Taken:
    """In rows of the continuing turn's KV, what is stored included: at the worst moment, and when all is over."""

    peak: float
    after: float


class WithState:
    """The model with a layer in front whose state cannot be cut."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.layers = inner, inner.layers

    def make_cache(self) -> list[Any]:
        return [ArraysCache(1), *make_prompt_cache(self._inner)]

    def __call__(self, tokens: Any, cache: list[Any]) -> Any:
        before = 0 if cache[0][0] is None else cache[0][0]
        cache[0][0] = before + tokens.sum(axis=-1, keepdims=True)
        return self._inner(tokens, cache=cache[1:])


@cache
def narrow(windowed: bool, layers: int = LAYERS) -> Any:
    """Little to compute and much to keep. `layers` with rows, and between them others with windows."""
    return of_layers(["sliding_attention", "full_attention"] * layers if windowed else ["full_attention"] * layers)


class OneLayer(SmallModel):
    """A drafter whose KV is as large as that of one layer of the model."""

    def __init__(self) -> None:
        super().__init__(of_layers(["full_attention"]), 256)


def server(kind: str, batches: bool = True) -> tuple[KVStore, Scheduler, Drafts | None]:
    layers = 4 if kind.startswith("few") else LAYERS
    made = WithState(narrow(False)) if kind == "hybrid" else narrow(kind.endswith("windowed"), layers)
    drafts = None
    if kind == "headed":
        made = HeadedModel(narrow(False), OneLayer(), None)
        drafts = Drafts(DraftGate(Published({1: 1.0, 32: 1.0}), head=0.01))
    quantisation = Quantisation(8, 64, 0) if kind == "8-bit" else None
    fresh = lambda: make_prompt_cache(made)  # noqa: E731
    kv = KVStore(LayerKit(fresh), StoreConfig(budget_bytes=BUDGET))
    store = GuardedStore(kv, fresh)
    gate = None if drafts is None else drafts.gate
    runner = ModelRunner(made, eos=[NEVER], max_rows=2, quantisation=quantisation, batches=batches, gate=gate)
    return kv, scheduler_on(runner, store, 2, FixedMemory(0, BUDGET), drafts=drafts, step=64), drafts


def held_now() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def conversation(kind: str, turns: int = 5, fork: int = 0) -> Taken:
    """Of the last four turns. `fork`: at the last one another request reads so many tokens of the conversation."""
    kv, scheduler, drafts = server(kind, batches=not fork)
    before = held_now()  # weights are no KV
    tokens = [number % 250 for number in range(HISTORY)]
    peak = 0
    for number in range(turns):
        mx.clear_cache()
        mx.reset_peak_memory()
        work, sink = submit(f"turn {number}", tokens, max_tokens=SAID)
        scheduler.add(replace(work, session="s", sampling=Sampling(temperature=0)))
        if fork and number == turns - 1:
            while not sink.tokens:
                scheduler.step()
            other, other_sink = submit("fork", [*tokens[:fork], *range(200, 220)], max_tokens=2)
            scheduler.add(replace(other, session="t", sampling=Sampling(temperature=0)))
        drain(scheduler)
        assert number == 0 or sink.done.report.reused >= len(tokens) - NEW - 1
        peak = max(peak, mx.get_peak_memory() if number else 0)
        tokens = [*tokens, *sink.done.tokens, *(number + n for n in range(NEW))]
    assert not fork or other_sink.done.report.reused == fork
    if drafts is not None:
        assert sink.done.report.drafted > 0
        drafts.close()
    used = kv.stats()["used_bytes"]
    taken = Taken((peak - before) / used, (mx.get_active_memory() + mx.get_cache_memory() - before) / used)
    print(f"{kind}, fork={fork}: {taken}, {used / len(tokens):,.0f} bytes a token")
    return taken


LONGER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "few windowed")]


def thorough(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.thorough) for kind in kinds]


@pytest.mark.parametrize("kind", ["few plain", *thorough("hybrid", "windowed", "8-bit", "headed"), *LONGER])
def test_four_turns_of_a_conversation_hold_its_kv_once(kind: str) -> None:
    taken = conversation(kind)
    assert taken.peak <= 1.3 and taken.after <= 1.05


def test_a_head_of_one_layer_adds_the_kv_of_one_layer() -> None:
    plain, headed = narrow(False), HeadedModel(narrow(False), OneLayer(), None)
    sizes = []
    for made in (plain, headed):
        cache = made.make_cache() if made is headed else make_prompt_cache(made)
        made(mx.zeros((1, 256), dtype=mx.int32), cache=cache)
        sizes.append(LayerKit(lambda made=made: make_prompt_cache(made)).slice(cache, 0, 256).nbytes)  # type: ignore[misc]
    assert sizes[1] == sizes[0] * (LAYERS + 1) / LAYERS == 256 * (LAYERS + 1) * 2 * WIDTH * 4


@pytest.mark.thorough
def test_a_fork_that_is_read_meanwhile_adds_what_it_reads() -> None:
    taken = conversation("plain", turns=3, fork=HISTORY // 8)
    assert taken.peak <= 1.5 and taken.after <= 1.05


def two_conversations(kind: str) -> Taken:
    """Their third turns, which are answered at the same time; one answer ends before the other."""
    kv, scheduler, _ = server(kind)
    before = held_now()
    texts = [[(number + first) % 250 for number in range(HISTORY)] for first in (0, 100)]
    for turn in range(3):
        if turn == 2:
            mx.clear_cache()
            mx.reset_peak_memory()
        sinks = []
        for number, tokens in enumerate(texts):
            work, sink = submit(f"{turn} {number}", tokens, max_tokens=2 * SAID * (1 + number) if turn == 2 else SAID)
            scheduler.add(replace(work, session=str(number), sampling=Sampling(temperature=0)))
            sinks.append(sink)
            if turn < 2:
                drain(scheduler)
        drain(scheduler)
        texts = [[*t, *sink.done.tokens, *range(NEW)] for t, sink in zip(texts, sinks, strict=True)]
    assert all(sink.done.report.reused >= HISTORY for sink in sinks)
    used = kv.stats()["used_bytes"]
    taken = Taken((mx.get_peak_memory() - before) / used, (held_now() - before) / used)
    print(f"two, {kind}: {taken}")
    return taken


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hybrid", "windowed", "8-bit", *LONGER])
def test_two_conversations_in_a_batch_hold_their_kv_once(kind: str) -> None:
    taken = two_conversations(kind)
    assert taken.peak <= 1.3 and taken.after <= 1.05
