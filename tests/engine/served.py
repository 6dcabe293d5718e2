"""A scheduler with a real store on the oracle, and clients that know what they must be answered.

The oracle's KV is the token history, so that a row which is wrong by one token gives another answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.drafting import Published
from start_llm.core.events import Failed
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.engine.fakes import Collected, FixedMemory, engine_step, scheduler_on
from tests.oracle import Oracle, expected_truth

START, END = 2, 3
GREEDY = Sampling(temperature=0)
WIDE_IS_CHEAP = {1: 1.0, 32: 1.2}
Message = dict[str, str]
SYSTEM: Message = {"role": "system", "content": "You are careful. " + "word " * 12}


@dataclass
class Request:
    name: str
    messages: list[Message]
    tokens: list[int]
    answer: str
    sink: Collected = field(default_factory=Collected)


class Server:
    """
    Args:
        stored, running: the most bytes of KV; 0: no limit.
        drafts: rows verify drafts.
        arrays: the most of stored KV; 0: no limit.

    Attributes:
        faults: that were planted: a request may have failed by one.
    """

    def __init__(
        self,
        oracle: Oracle,
        stored: int,
        running: int = 0,
        *,
        drafts: bool = False,
        arrays: int = 0,
        disk: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.oracle = oracle
        make_cache = oracle.model.make_cache
        self.kit = LayerKit(make_cache)
        config = StoreConfig(stored, checkpoint_grid=32, checkpoints_recent=2, ghost_tokens=200, most_arrays=arrays)
        self.store = KVStore(self.kit, config, disk=disk, clock=clock)
        self.drafts = Drafts(DraftGate(Published(WIDE_IS_CHEAP))) if drafts else None
        gate = self.drafts.gate if self.drafts else None
        self.runner = ModelRunner(self.model, eos=[END], max_rows=3, gate=gate)
        self.guarded, memory = GuardedStore(self.store, make_cache), FixedMemory(running, stored)
        limits = {"step": 24, "idle_step": 16, "join": 16}
        self.scheduler = scheduler_on(self.runner, self.guarded, 3, memory, drafts=self.drafts, clock=clock, **limits)
        self.requests: list[Request] = []
        self.faults = 0

    def model(self, inputs: Any, cache: Any) -> Any:
        return self.oracle.model(inputs, cache=cache)

    def ask(self, history: list[Message], text: str, filler: int, session: str = "") -> Request:
        messages = [*history, {"role": "user", "content": f"{text} [[truth]][[long {filler}]]"}]
        tokens = self.oracle.prompt(messages)
        answer = f"{expected_truth(tokens)}\n{' the' * filler}"
        request = Request(str(len(self.requests)), messages, tokens, answer)
        marks = tuple(place for place, token in enumerate(tokens) if token == START and place)
        prompt = Prompt(tuple(tokens), boundaries=marks, generation=len(tokens) - 3, system_end=marks[0])
        self.requests.append(request)
        work = Submit(request.name, prompt, GREEDY, 200, request.sink, session=session or request.name)
        self.scheduler.add(work)
        return request

    def guess(self, messages: list[Message], session: str | None = None) -> tuple[int, ...]:
        """Idle work on what may come: its tokens."""
        tokens = tuple(self.oracle.prompt(messages))
        boundaries = tuple(place for place in (40, 80) if place < len(tokens))
        prompt = Prompt(tokens, boundaries=boundaries, generation=len(tokens))
        self.scheduler.idle_prefill.begin(Submit("idle", prompt, GREEDY, 1, Collected(), session=session))
        return tokens

    def told(self, request: Request) -> list[Message]:
        """The conversation up to its answer."""
        said = self.oracle.tokenizer.decode([token for token in request.sink.tokens if token != END])
        return [*request.messages, {"role": "assistant", "content": said}]

    def step(self) -> None:
        engine_step(self.scheduler)

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.busy and not self.scheduler.idle_prefill.waiting:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def failed(self) -> list[str]:
        """The requests that failed; all others are answered as they must be."""
        failed = []
        for request in self.requests:
            final = request.sink.final
            expected = self.oracle.model.answers.encode(request.answer)
            if isinstance(final, Failed):
                assert self.faults, final
                failed.append(request.name)
            else:
                said = [token for token in request.sink.tokens if token != END]
                cut = request.sink.done.reason == "cancelled"
                assert said == expected[: len(said)] and (cut or said == expected), (request.name, final)
        assert not self.scheduler.busy and not self.store.lent_rows._rows
        return failed

    def close(self) -> None:
        if self.drafts is not None:
            self.drafts.close()
        self.runner.close()
        self.guarded.close()
