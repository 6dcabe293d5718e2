"""What a continuing turn takes: its KV once, and a layer of it that moves."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.sampling import TextDrawing
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.scheduler import Scheduler, SchedulerLimits
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import FixedMemory, submit
from tests.engine.schedule.test_scheduler import drain

LAYERS, HEADS, WIDTH = 8, 8, 512
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4
HISTORY, NEW, SAID = 1100, 20, 8
BUDGET = 4 << 30
NEVER = 10**9  # no token ends an answer


@cache
def model() -> Any:
    """Little to compute and much to keep."""
    mx.random.seed(0)
    made = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=LAYERS,
            intermediate_size=32,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            rms_norm_eps=1e-5,
            vocab_size=256,
            tie_word_embeddings=False,
        )
    )
    mx.eval(made.parameters())
    return made


def store_of(history: list[int]) -> GuardedStore:
    """It holds KV of so many tokens, whatever is in it."""
    caches: list[KVCache] = make_prompt_cache(model())
    for layer in caches:
        layer.update_and_fetch(*(mx.zeros((1, HEADS, len(history), WIDTH)) for _ in range(2)))
    mx.eval([layer.state for layer in caches])
    store = KVStore(LayerKit(lambda: make_prompt_cache(model())), StoreConfig(budget_bytes=BUDGET))
    store.put(history, caches, session="s")
    return GuardedStore(store, lambda: make_prompt_cache(model()))


@dataclass
class Taken:
    """In rows of the continuing turn's KV, what is stored included: at the worst moment, and when all is over."""

    peak: float
    after: float


def continuing_turn(alone: bool, beside: int) -> Taken:
    """
    Args:
        alone: rows decode as the server decodes them; else `BatchGenerator` has them all.
        beside: so many short requests decode at the same time.
    """
    history = [number % 250 for number in range(HISTORY)]
    drafts = Drafts(DraftGate(Published({1: 1.0})))
    model()  # its weights are no KV
    gc.collect()  # what another run has left
    mx.clear_cache()
    before = mx.get_active_memory()
    store = store_of(history)
    if alone:
        runner = ModelRunner(model(), eos=[NEVER], max_rows=2, gate=drafts.gate)
    else:
        runner = BatchRunner(model(), eos=[NEVER], max_rows=2)
    scheduler = Scheduler(
        runner,
        store,
        lambda work, generated: TextDrawing(work, None, generated, drafts),
        limits=SchedulerLimits(step=128),
        max_concurrency=2,
        memory=MemoryGuard(store, FixedMemory(0, BUDGET)),
        clock=time.monotonic,
    )
    mx.clear_cache()
    mx.reset_peak_memory()
    work, sink = submit("a", [*history, *range(NEW)], max_tokens=SAID)
    sinks = [sink]
    for number in range(beside):
        other, other_sink = submit(f"beside {number}", [*range(200, 216)], max_tokens=2 * SAID)
        scheduler.add(replace(other, sampling=Sampling(temperature=0)))
        sinks.append(other_sink)
    scheduler.add(replace(work, session="s", sampling=Sampling(temperature=0)))
    drain(scheduler)
    drafts.close()
    assert sink.done.report.reused == HISTORY and all(len(one.done.tokens) >= SAID for one in sinks)
    row = TOKEN_BYTES * (HISTORY + NEW + SAID)
    taken = Taken(
        (mx.get_peak_memory() - before) / row, (mx.get_active_memory() + mx.get_cache_memory() - before) / row
    )
    print(f"alone={alone}, beside={beside}: {taken}")  # pytest -s, or a failure, shows it
    return taken


def test_a_continuing_turn_alone_takes_its_row_once_and_leaves_nothing() -> None:
    assert TOKEN_BYTES >= 250_000
    taken = continuing_turn(alone=True, beside=0)
    assert taken.peak <= 1.3 and taken.after <= 1.05


@pytest.mark.slow
def test_a_continuing_turn_beside_another_request_takes_no_more_than_in_batch_generator() -> None:
    """But for the room that a row gets when it changes over: some 300 tokens, however long it is."""
    ours, today = (continuing_turn(alone, beside=1) for alone in (True, False))
    room = 400 / (HISTORY + NEW + SAID)
    assert ours.peak <= today.peak + room and ours.after <= today.after + 0.02
