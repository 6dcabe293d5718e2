"""Which work the model does next. Model thread only; knows no MLX: effects go in as `Runner` and `KVStore`.

A step is: end what is cancelled or late, admit what fits, one decode step of
all rows, one prefill chunk of one request. A request whose prompt shares an
uncomputed prefix with one that is being prefilled waits for that prefix
instead of computing it again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from start_llm.core.errors import Internal, OutOfMemory, StartLLMError
from start_llm.core.events import Admitted, Prefilled, Sampled, TokenLogprob
from start_llm.core.report import CacheReport, Miss
from start_llm.core.work import Submit
from start_llm.engine.jobs import EndReason, Job, Stage
from start_llm.engine.memory import MemoryGuard
from start_llm.engine.runner import Cache, Row, Runner
from start_llm.kvcache.blocks import as_tokens, common_prefix
from start_llm.kvcache.store import KVStore, Plan

log = logging.getLogger(__name__)

KV_FIGURES = (
    *("segments", "leaves", "bytes", "budget_bytes"),
    *("checkpoints", "checkpoint_bytes", "sessions", "evicted"),
)
Processors = list[Callable[[Any, Any], Any]]


class Drawing(Protocol):
    """How one request's tokens are drawn; holds state of its row (seed, grammar, penalties)."""

    sampler: Callable[[Any], Any]
    processors: Processors

    def logprob(self, token: int) -> TokenLogprob | None:
        """Of the row's next reported token, if the client asked; called once per token, in order.

        Raises what went wrong with the row's grammar: such a request ends with an error, never with garbage.
        """
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """`step`: prompt tokens a chunk; `idle_step`: the same while re-anchoring; `deadline`: seconds, 0 is none.

    `join`: a shared prefix shorter than this is computed again rather than waited for.
    """

    step: int
    idle_step: int = 128
    deadline: float = 0.0
    join: int = 64


class Scheduler:
    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        draw: Callable[[Submit], Drawing],
        *,
        eos: frozenset[int],
        limits: Limits,
        max_concurrency: int,
        memory: MemoryGuard,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._store, self._draw = runner, store, draw
        self._eos, self._limits, self._clock = eos, limits, clock
        self._memory = memory
        self._room = min(max_concurrency, runner.max_rows)
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: dict[int, Job] = {}
        self._by_id: dict[str, Job] = {}
        self._anchor: Job | None = None
        self._anchored: deque[tuple[Any, int, int]] = deque(maxlen=32)
        self._turn = 0
        self.seconds_per_token = 0.0
        self.tokens_idle = 0
        self.tokens_prefilled = 0
        self.tokens_decoded = 0
        self.trim_misses = 0

    # --- what the engine thread calls -------------------------------------

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def has_idle_work(self) -> bool:
        return self._anchor is not None

    def add(self, work: Submit) -> None:
        now = self._clock()
        deadline = now + self._limits.deadline if self._limits.deadline else float("inf")
        job = Job(work, as_tokens(work.prompt.tokens), submitted=now, deadline=deadline)
        self._by_id[work.id] = job
        self._waiting.append(job)

    def add_anchor(self, work: Submit) -> None:
        """Replaces the pending re-anchoring work, if there is one."""
        self._drop_anchor()
        self._anchor = Job(work, as_tokens(work.prompt.tokens), submitted=self._clock(), idle=True)

    def cancel(self, work_id: str) -> None:
        job = self._by_id.get(work_id)
        if job is not None:
            job.cancelled = True

    def step(self) -> None:
        self._reap()
        if self.busy:
            self._drop_anchor()
        self._admit()
        self._decode()
        self._prefill()

    def idle_step(self) -> None:
        """A small chunk of re-anchoring; called when nothing else is to be done."""
        job = self._anchor
        if job is None:
            return
        try:
            if job.cache is None and not self._begin_anchor(job):
                self._anchor = None
                return
            before = job.position
            self._chunk(job, self._limits.idle_step)
            self.tokens_idle += job.position - before
            if job.position >= len(job.tokens):
                self._finish_anchor()
        except Exception:
            log.warning("re-anchoring failed", exc_info=True)
            self._anchor = None

    def rest(self) -> None:
        """To be called now and then while there is nothing to do."""
        self._store.idle()

    def figures(self) -> dict[str, float]:
        """Totals of the work done and the store's sizes, by the names that `/metrics` shows."""
        stats = self._store.stats()
        return {
            "tokens_prefilled": self.tokens_prefilled,
            "tokens_prefilled_idle": self.tokens_idle,
            "tokens_decoded": self.tokens_decoded,
            "hybrid_trim_miss": self.trim_misses,
            **{f"kv_{name}": getattr(stats, name) for name in KV_FIGURES},
            **{f"kv_disk_{name}": value for name, value in stats.disk.items()},
        }

    def plan(self, tokens: tuple[int, ...]) -> CacheReport:
        array = as_tokens(tokens)
        plan = self._store.lookup(array, limit=len(array) - 1)
        return _report(len(array), plan)

    def fail_all(self, error: StartLLMError) -> None:
        """Ends everything; nothing of what was running is stored."""
        for job in list(self._by_id.values()):
            self._memory.give(job.work.id)
            job.fail(error)
        for uid in list(self._decoding):
            self._runner.remove(uid)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._by_id.clear()
        self._anchor = None

    # --- ending -------------------------------------------------------------

    def _reap(self) -> None:
        now = self._clock()
        for job in [j for j in self._by_id.values() if j.cancelled or now >= j.deadline]:
            self._abort(job, "cancelled" if job.cancelled else "deadline")

    def _abort(self, job: Job, reason: EndReason) -> None:
        """Ends a job early; the KV that is already computed is kept."""
        if job.stage is Stage.WAITING:
            self._waiting.remove(job)
        elif job.stage is Stage.PREFILL:
            self._prefilling.remove(job)
            if job.cache is not None and job.position > job.report.reused:
                self._put(job, job.position, job.cache)
        elif job.stage is Stage.DECODE:
            self._decoding.pop(job.uid, None)
            removed = self._runner.remove(job.uid)
            if removed is not None:
                self._store_end(job, *removed)
        self._end(job, reason)

    def _end(self, job: Job, reason: EndReason) -> None:
        job.report = replace(job.report, generated=len(job.generated))
        job.cache = None
        self._memory.give(job.work.id)
        self._by_id.pop(job.work.id, None)
        job.end(reason)

    @contextmanager
    def _failing(self, job: Job) -> Iterator[None]:
        """What goes wrong with one request ends that request only."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged and sent to the client by _fail
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        log.warning("request %s failed: %s", job.work.id, error, exc_info=not isinstance(error, StartLLMError))
        self._memory.give(job.work.id)
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._prefilling:
            self._prefilling.remove(job)
        if self._decoding.pop(job.uid, None) is not None:
            self._runner.remove(job.uid)
        job.cache = None
        self._by_id.pop(job.work.id, None)
        job.fail(error if isinstance(error, StartLLMError) else _as_error(error))

    # --- admission ----------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self.running < self._room:
            job = self._waiting[0]
            with self._failing(job):
                if not self._memory.admits(job.most_tokens):
                    return
                self._waiting.popleft()
                self._memory.take(job.work.id, job.most_tokens)
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """Plans and restores, unless another job is computing more of this prompt than is stored."""
        plan = self._store.lookup(job.tokens, limit=job.prefix)
        leader, shared = self._leader(job, plan.length)
        job.stage, job.admitted = Stage.PREFILL, self._clock()
        self._prefilling.append(job)
        if leader is not None:
            job.leader, job.leader_until, job.stored = leader, shared, plan.length
            if shared not in leader.pauses and shared > leader.position:
                leader.pauses = sorted({*leader.pauses, shared})
            return
        self._restore(job, plan, joined=0)

    def _leader(self, job: Job, stored: int) -> tuple[Job | None, int]:
        best: Job | None = None
        reach = stored + self._limits.join
        for other in self._prefilling:
            if other is job or other.leader is not None:
                continue
            shared = min(common_prefix(job.tokens, other.tokens), job.prefix, other.prefix)
            if shared > reach:
                best, reach = other, shared
        return best, reach

    def _restore(self, job: Job, plan: Plan, joined: int) -> None:
        restored = self._store.restore(job.tokens, plan)
        self.trim_misses += plan.reason == "no_checkpoint"
        job.cache, job.position, job.leader = restored.cache, restored.length, None
        job.pauses = [p for p in self._store.pauses(job.work.prompt, job.position) if p < job.prefix]
        job.report = replace(
            _report(len(job.tokens), plan),
            reused=restored.length,
            computed=len(job.tokens) - restored.length,
            joined=max(0, min(joined, restored.length)),
            computed_idle=self._idle_share(job, restored.length),
            copied_bytes=restored.copied_bytes,
            seconds_queued=job.admitted - job.submitted,
        )
        job.send(Admitted(job.report))

    def _idle_share(self, job: Job, reused: int) -> int:
        """Reused tokens that re-anchoring had computed."""
        best = 0
        for tokens, start, end in self._anchored:
            shared = min(common_prefix(job.tokens, tokens), reused, end)
            best = max(best, shared - start)
        return best

    # --- decode ---------------------------------------------------------------

    def _decode(self) -> None:
        if not self._decoding:
            return
        began = self._clock()
        for row in self._runner.decode():
            job = self._decoding.get(row.uid)
            if job is None:
                continue
            with self._failing(job):
                self._take(job, row)
        spent = self._clock() - began
        for job in self._decoding.values():
            job.busy += spent

    def _take(self, job: Job, row: Row) -> None:
        self.tokens_decoded += 1
        job.generated.append(row.token)
        logprob = job.drawing.logprob(row.token) if job.drawing is not None else None
        if row.token not in self._eos:
            job.send(Sampled(row.token, logprob))
        if row.finish is None:
            return
        self._decoding.pop(row.uid)
        if row.cache is not None and row.tokens is not None:
            self._store_end(job, row.cache, row.tokens)
        self._end(job, row.finish)

    def _store_end(self, job: Job, cache: Cache, tokens: Any) -> None:
        self._store.put(
            as_tokens(tokens),
            cache,
            session=job.work.session,
            one_shot=job.work.one_shot,
            seconds_per_token=self.seconds_per_token,
        )

    # --- prefill ----------------------------------------------------------------

    def _prefill(self) -> None:
        """Up to a step's worth of prompt tokens, so that several short prompts join the batch together."""
        left = self._limits.step
        while left > 0:
            job = self._pick()
            if job is None:
                return
            before = job.position
            with self._failing(job):
                self._chunk(job, left)
                job.send(Prefilled(min(job.position, job.prefix) + 1, len(job.tokens)))
                if job.position >= job.prefix:
                    self._start_decoding(job)
            left -= max(1, job.position - before)

    def _pick(self) -> Job | None:
        """Alternates between the oldest and the one that is nearest to its first token."""
        for job in [j for j in self._prefilling if j.leader is not None]:
            self._follow(job)
        ready = [j for j in self._prefilling if j.leader is None and j.cache is not None]
        if not ready:
            return None
        self._turn += 1
        return ready[0] if self._turn % 2 else min(ready, key=lambda j: j.prefix - j.position)

    def _follow(self, job: Job) -> None:
        """Restores from what the leader has stored, once it got there or is gone."""
        leader = job.leader
        if leader is None:
            return
        running = leader.stage is Stage.PREFILL and leader in self._prefilling
        if running and leader.position < job.leader_until:
            return
        with self._failing(job):
            if running and leader.cache is not None:
                self._put(leader, leader.position, leader.cache)
            plan = self._store.lookup(job.tokens, limit=job.prefix)
            self._restore(job, plan, joined=plan.length - job.stored)

    def _chunk(self, job: Job, step: int) -> None:
        """Prefills up to `step` tokens, no further than the next pause; stores at a pause."""
        assert job.cache is not None
        until = len(job.tokens) if job.idle else job.prefix
        end = min(job.position + step, until)
        while job.pauses and job.pauses[0] <= job.position:
            job.pauses.pop(0)
        if job.pauses:
            end = min(end, job.pauses[0])
        if end > job.position:
            began = self._clock()
            self._runner.prefill(job.cache, job.tokens[job.position : end].tolist())
            self._measure(end - job.position, self._clock() - began)
            job.busy += self._clock() - began
            job.position = end
        if job.pauses and job.position == job.pauses[0]:
            job.pauses.pop(0)
            self._put(job, job.position, job.cache)

    def _measure(self, tokens: int, seconds: float) -> None:
        """Keeps a moving average of the prefill cost: eviction weighs KV by it."""
        self.tokens_prefilled += tokens
        cost = seconds / tokens
        self.seconds_per_token = cost if not self.seconds_per_token else 0.8 * self.seconds_per_token + 0.2 * cost

    def _start_decoding(self, job: Job) -> None:
        assert job.cache is not None
        self._put(job, job.position, job.cache, checkpoint=False)
        self._prefilling.remove(job)
        job.report = replace(job.report, seconds_prefill=self._clock() - job.admitted)
        cache, job.cache = job.cache, None
        job.drawing = drawing = self._draw(job.work)
        job.uid = self._runner.insert(
            job.work.prompt.tokens,
            cache,
            max_tokens=job.work.max_tokens,
            sampler=drawing.sampler,
            processors=drawing.processors,
        )
        job.stage = Stage.DECODE
        self._decoding[job.uid] = job

    def _put(self, job: Job, length: int, cache: Cache, checkpoint: bool = True) -> None:
        self._store.put(
            job.tokens[:length],
            cache,
            session=job.work.session,
            one_shot=job.work.one_shot,
            seconds_per_token=self.seconds_per_token,
            checkpoint=checkpoint,
        )

    # --- re-anchoring -------------------------------------------------------------

    def _begin_anchor(self, job: Job) -> bool:
        plan = self._store.lookup(job.tokens, limit=len(job.tokens))
        if plan.length >= len(job.tokens) or not self._store.has_room(len(job.tokens) - plan.length):
            return False
        restored = self._store.restore(job.tokens, plan)
        job.cache, job.position = restored.cache, restored.length
        job.report = replace(job.report, reused=restored.length)
        job.pauses = list(self._store.pauses(job.work.prompt, job.position))
        return True

    def _finish_anchor(self) -> None:
        job, self._anchor = self._anchor, None
        if job is not None and job.cache is not None and job.position > job.report.reused:
            self._put(job, job.position, job.cache)
            self._anchored.append((job.tokens, job.report.reused, job.position))

    def _drop_anchor(self) -> None:
        """Stops re-anchoring and keeps what it has."""
        if self._anchor is not None:
            self._finish_anchor()


def _report(prompt: int, plan: Plan) -> CacheReport:
    """Counts, with the store's part of the explanation; `chat` keeps the miss only where more was computed than new."""
    return CacheReport(
        prompt=prompt,
        reused=plan.length,
        computed=prompt - plan.length,
        new=max(0, prompt - plan.seen),
        miss=Miss(plan.reason or ("diverged" if plan.seen else "first_turn"), plan.matched),
    )


def _as_error(error: Exception) -> StartLLMError:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return OutOfMemory("The request does not fit in this machine's memory.")
    return Internal(f"The model failed on this request: {type(error).__name__}: {error}")
