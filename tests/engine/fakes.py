"""A model and a store without MLX: a cache is the list of its tokens, and every forward pass is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from start_llm.core.events import EngineDone, EngineEvent, Failed, Sampled
from start_llm.core.prompt import Prompt
from start_llm.core.request import Sampling
from start_llm.core.work import Submit
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.row import DecodeRow, RowState
from start_llm.engine.decode.sampling import TextDrawing
from start_llm.engine.schedule.guarded import KV_FIGURES, GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard, SharedMemory
from start_llm.engine.schedule.scheduler import Scheduler, SchedulerLimits
from start_llm.engine.thread import EngineThread
from start_llm.kvcache.blocks import common_prefix
from start_llm.kvcache.store import RestorePlan
from start_llm.kvcache.types import StoredEnd

EOS = 0


@dataclass
class FakeRunner:
    """Generates ``sum(history) % 97 + 1`` until `answer` tokens are out, then EOS."""

    max_rows: int = 8
    token_bytes: int = 0
    answer: int = 3
    fail_on: int | None = None
    call_mark: int | None = None  # the token that begins a call
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    rows: dict[int, list[Any]] = field(default_factory=dict)
    suspended: dict[tuple[int, ...], int] = field(default_factory=dict)
    steps: int = 0
    uid: int = 0
    widest: int = 0

    def prefill(self, cache: list[Any], tokens: Sequence[int], images: Sequence[Any] = ()) -> int:
        if self.fail_on in tokens:
            raise RuntimeError("bad token")
        self.prefilled.append((len(cache), len(tokens)))
        cache.extend(tokens)
        return len(tokens) * self.token_bytes

    def calls(self, answer: Sequence[int]) -> bool | None:
        return None if self.call_mark is None else self.call_mark in answer

    def insert(self, row: RowState) -> int:
        assert row.tokens == row.cache
        self.uid += 1
        if row.fresh:
            drawn = row.sampler.__self__.drawn  # type: ignore[attr-defined]
            self.rows[self.uid] = [[*row.cache, row.newest], len(row.tokens) + 1 - drawn, row.left + drawn]
        else:
            prompt = self.suspended.pop(tuple(row.tokens))
            assert row.newest == self.next(row.cache, prompt)
            self.rows[self.uid] = [list(row.cache), prompt, len(row.cache) - prompt + row.left]
        return self.uid

    def decode(self) -> list[DecodeRow]:
        self.steps += 1
        self.widest = max(self.widest, len(self.rows))
        out = []
        for uid, (history, prompt, most) in list(self.rows.items()):
            made = len(history) - prompt
            token = self.next(history, prompt)
            history.append(token)
            finish = "stop" if token == EOS else "length" if made + 1 >= most else None
            if finish:
                del self.rows[uid]
            held: Any = (list(history), list(history)) if finish else ()
            out.append(DecodeRow(uid, token, None, finish, *held))  # type: ignore[arg-type]
        return out

    def next(self, history: list[int], prompt: int) -> int:
        return EOS if len(history) - prompt >= self.answer else sum(history) % 97 + 1

    def suspend(self, uid: int) -> RowState | None:
        history, prompt, most = self.rows.get(uid, [[], 0, 0])
        token = self.next(history, prompt)
        left = most - (len(history) - prompt)
        if not history or token == EOS or left <= 1:
            return None
        del self.rows[uid]
        self.suspended[tuple(history)] = prompt
        return RowState(list(history), list(history), token, left, lambda logprobs: logprobs, fresh=False)

    def remove(self, uid: int) -> tuple[list[Any], list[int]] | None:
        row = self.rows.pop(uid, None)
        return None if row is None else (list(row[0]), list(row[0]))

    def clear(self) -> None:
        self.rows.clear()

    close = clear

    @property
    def work(self) -> int:
        return sum(n for _, n in self.prefilled)


@dataclass
class Restored:
    cache: list[Any]
    length: int
    copied_bytes: int


@dataclass
class FakeStore:
    """Whole sequences; with `cuttable=False` only exact stored ends can be restored."""

    cuttable: bool = True
    entries: list[np.ndarray] = field(default_factory=list)
    heads: list[bool] = field(default_factory=list)
    calls: list[bool | None] = field(default_factory=list)
    room: bool = True
    token_bytes: int = 0
    arrays: int = 0
    budgets: list[int] = field(default_factory=list)

    def lookup(self, tokens: Any, limit: int | None = None) -> RestorePlan:
        seen = max((common_prefix(np.asarray(tokens), e) for e in self.entries), default=0)
        length = seen if limit is None else min(seen, limit)
        if not self.cuttable:
            length = max((len(e) for e in self.entries if len(e) <= length), default=0)
        return RestorePlan(length, seen, seen, "" if length == seen else "no_checkpoint")

    peek = lookup

    def restore(self, tokens: Any, plan: RestorePlan) -> Restored:
        return Restored([int(t) for t in tokens[: plan.length]], plan.length, plan.length * 4)

    def take_back(self, cache: list[Any], *, valid: bool = True) -> None:
        pass

    def moved(self, cache: list[Any], reader: Any) -> None:
        pass

    def stops(self, prompt: Prompt, start: int) -> tuple[int, ...]:
        return () if self.cuttable else tuple(b for b in prompt.boundaries if b > start)

    def put(self, tokens: Any, cache: list[Any], about: StoredEnd) -> None:
        assert [int(t) for t in tokens] == [int(t) for t in cache]
        if self.cuttable or about.checkpoint:
            self.entries.append(np.asarray(tokens))
            self.heads.append(about.system_end)
            self.calls.append(about.calls)

    def idle(self) -> None:
        pass

    @property
    def resident(self) -> FakeStore:
        return self

    sizes = lent_rows = resident

    def estimate(self, tokens: int) -> int:
        return tokens * self.token_bytes

    def set_budget(self, budget_bytes: int | None, others: int = 0, stores: int = 1) -> None:
        if budget_bytes is not None:
            self.budgets.append(budget_bytes)

    def stats(self) -> Any:
        return {**dict.fromkeys(KV_FIGURES, len(self.entries)), "disk_files": 1}

    def has_room(self, tokens: int) -> bool:
        return self.room


class FakeDrawing:
    """Knows how much was drawn before: the fake runner counts from there."""

    def __init__(self, work: Submit, generated: Sequence[int]) -> None:
        self.drawn = len(generated)
        self.processors: list[Any] = []
        self.drafts = RowDrafts()

    def sampler(self, logprobs: Any) -> Any:
        return logprobs

    def logprob(self, token: int) -> None:
        return None


class FixedMemory(SharedMemory):
    """So many bytes of KV, whatever weights take."""

    def __init__(
        self, total: int = 0, most_stored: int = 0, reclaim: Callable[[int], bool] = lambda need: False
    ) -> None:
        super().__init__(0, most_stored, reclaim)
        self.fixed = total

    @property
    def total(self) -> int:
        return self.fixed


PASS = 0.06
"""Seconds of a decode pass of a large model."""


@dataclass
class SlowRunner(FakeRunner):
    """Each pass takes the time that it would take on the machine. `token`: seconds of each token of a chunk."""

    now: float = 0.0
    token: float = PASS / 16
    passes: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    answer: int = 10**9

    def clock(self) -> float:
        return self.now

    def prefill(self, cache: list[Any], tokens: Sequence[int], images: Sequence[Any] = ()) -> int:
        self.chunks.append(PASS + self.token * len(tokens))
        self.now += self.chunks[-1]
        return super().prefill(cache, tokens, images)

    def decode(self) -> list[DecodeRow]:
        self.now += PASS
        self.passes.append(self.now)
        return super().decode()


def scheduler_on(
    runner: Any,
    store: GuardedStore,
    rows: int,
    memory: SharedMemory | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    draw: Any = None,
    drafts: Drafts | None = None,
    grammars: Grammars | None = None,
    kind: Any = Scheduler,
    **limits: Any,
) -> Scheduler:
    """`rows`: the most that run together. `draw`: instead of a real drawing, with these drafts and grammars."""
    made: Scheduler = kind(
        runner,
        store,
        draw or (lambda work, generated: TextDrawing(work, grammars, generated, drafts)),
        limits=SchedulerLimits(**limits),
        max_concurrency=rows,
        memory=MemoryGuard(store, memory or FixedMemory()),
        clock=clock,
    )
    return made


def scheduler_of(runner: SlowRunner, share: float) -> Scheduler:
    """`share`: of rows that decode beside a prompt."""
    guarded = GuardedStore(FakeStore(), list)  # type: ignore[arg-type]
    return scheduler_on(runner, guarded, 8, clock=runner.clock, draw=FakeDrawing, step=None, decode_share=share)


def new_row(
    prompt: Sequence[int], cache: list[Any], left: int, sampler: Any, processors: Any = (), **more: Any
) -> RowState:
    """A row that begins to decode: `cache` holds all of `prompt` but its last token."""
    return RowState(cache, list(prompt[:-1]), prompt[-1], left, sampler, processors, **more)


class Collected:
    """A sink that sorts what it gets."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[EngineEvent] = SimpleQueue()
        self.events: list[EngineEvent] = []

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.queue.put(event)

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.events if isinstance(e, Sampled)]

    @property
    def final(self) -> EngineDone | Failed | None:
        finals = [e for e in self.events if isinstance(e, EngineDone | Failed)]
        assert len(finals) <= 1, "a request ends once"
        return finals[0] if finals else None

    @property
    def done(self) -> EngineDone:
        assert isinstance(self.final, EngineDone), self.final
        return self.final


def submit(name: str, tokens: Sequence[int], *, max_tokens: int = 10, **more: Any) -> tuple[Submit, Collected]:
    sink = Collected()
    about = {name: more.pop(name) for name in ("boundaries", "system_end") if name in more}
    prompt = Prompt(tuple(tokens), generation=len(tokens), **about)
    return Submit(name, prompt, Sampling(), max_tokens, sink, **more), sink


def ask(scheduler: Scheduler, name: str, tokens: Sequence[int], **more: Any) -> Collected:
    """A request that the scheduler has from now on: what becomes of it."""
    work, sink = submit(name, tokens, **more)
    scheduler.add(work)
    return sink


def send(engine: EngineThread, name: str, tokens: Sequence[int], **more: Any) -> Collected:
    """As `ask`, to the thread."""
    work, sink = submit(name, tokens, **more)
    engine.submit(work)
    return sink


def engine_step(scheduler: Scheduler) -> None:
    """One step as the model thread does it."""
    try:
        if scheduler.busy:
            scheduler.step()
        else:
            scheduler.idle_prefill.step()
    except Exception as error:  # noqa: BLE001 - as it does
        scheduler.recover(error)


def steps(worker: Any, count: int) -> None:
    """`worker`: a scheduler, or its idle work."""
    for _ in range(count):
        worker.step()


def steps_until(scheduler: Scheduler, happened: Callable[[], Any], most: int = 100_000) -> None:
    for _ in range(most):
        if happened():
            return
        scheduler.step()
    raise AssertionError("it does not happen")
