"""Prompts on their way through the model, chunk by chunk, and what is done in the idle gap. Model thread only.

Of prompts that share a beginning which nobody has computed yet, the first one computes it, the others wait for it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from start_llm.core.events import Progress, Started
from start_llm.core.report import CacheReport, Miss
from start_llm.core.work import Submit
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import Cache
from start_llm.engine.schedule.guarded import STORE_ERROR, GuardedStore
from start_llm.engine.schedule.jobs import Followed, Job, Prefilling
from start_llm.engine.schedule.steps import StepSize
from start_llm.engine.schedule.urgent import UrgentShare, is_question
from start_llm.kvcache.blocks import Tokens, TokenSequence, as_tokens, common_prefix
from start_llm.kvcache.types import KVReader, Restored, RestorePlan, StoredEnd

log = logging.getLogger(__name__)

_REMEMBERED = 32


class Prefill:
    """Computes prompts and hands their KV to the store.

    `tokens`: prompt tokens that went through the model. `seconds_per_token`: moving average of what one costs; eviction
    weighs KV by it.
    """

    def __init__(self, runner: ModelRunner, store: GuardedStore, steps: StepSize, clock: Callable[[], float]) -> None:
        self._runner, self._store, self.steps, self._clock = runner, store, steps, clock
        self.tokens = 0
        self.seconds_per_token = 0.0

    def chunk(self, job: Job, step: int) -> int:
        """Prefills up to `step` tokens, no further than the next stop; stores there. Returns the tokens done."""
        at = job.prefill
        assert at.cache is not None
        before = at.position
        at.stops = [stop for stop in at.stops if stop > before]
        end = min([before + step, job.prefix, *at.stops[:1]])
        if (image := job.work.prompt.image_at(end)) is not None:  # no chunk cuts an image in two
            end = image.start if image.start > before else image.end
        if end > before:
            began = self._clock()
            inside = [image for image in job.work.prompt.images if before <= image.start < end]
            images = [replace(image, start=image.start - before) for image in inside]
            nbytes = self._runner.prefill(at.cache, job.tokens[before:end].tolist(), images)
            seconds = self._clock() - began
            self.tokens += end - before
            cost, usual = seconds / (end - before), self.seconds_per_token
            self.seconds_per_token = 0.8 * usual + 0.2 * cost if usual else cost
            self.steps.measure(end - before, end, seconds, nbytes)
            job.prefilled(end - before)
        if at.position in at.stops[:1]:
            self.keep(job)
        return end - before

    def restore(self, job: Job, plan: RestorePlan) -> Restored:
        """The job goes on from what is stored."""
        restored = self._store.restore(job.tokens, plan)
        job.lent = restored.cache
        stops = [stop for stop in self._store.stops(job.work.prompt, restored.length) if stop < job.prefix]
        job.state = Prefilling(restored.cache, restored.length, stops)
        return restored

    def take_back(self, job: Job, *, valid: bool = True) -> None:
        """The job's caches are the store's again: see `KVStore.take_back`. Unless they are that already."""
        cache, job.lent = job.lent, None
        if cache is not None:
            self._store.take_back(cache, valid=valid)

    def moved(self, job: Job, reader: KVReader | None) -> None:
        """The KV of the job's caches lies elsewhere: see `KVStore.moved`."""
        if job.lent is not None:
            self._store.moved(job.lent, reader)

    def keep(self, job: Job, *, checkpoint: bool = True) -> None:
        """Stores what the job's prefill has computed so far."""
        at = job.prefill
        if at.cache is not None:
            at_system_end = at.position == job.work.prompt.system_end
            about = StoredEnd(checkpoint=checkpoint, system_end=at_system_end, answered=False)
            self.store(job, job.tokens[: at.position], at.cache, about)

    def store(self, job: Job, tokens: TokenSequence, cache: Cache, about: StoredEnd) -> None:
        """Stores KV that belongs to the job: `cache` holds exactly `tokens`. `about`: without who asks and the cost."""
        work, cost = job.work, self.seconds_per_token
        about = replace(about, session=work.session, owner=work.owner, one_shot=work.one_shot, seconds_per_token=cost)
        self._store.put(tokens, cache, about)


def trusted(error: BaseException | None) -> bool:
    """Whether a row may still hold what it held before a pass that raised this. The device's own errors are of two
    classes, and after one of them nobody knows what it has written."""
    return not isinstance(error, RuntimeError | MemoryError)


class IdlePrefill:
    """At most one piece of idle work at a time. Whatever goes wrong with it ends it and nothing else.

    `chunk_tokens`: the most of a chunk; small, so that a request never waits for long. `tokens`: that were computed.
    """

    def __init__(self, prefill: Prefill, store: GuardedStore, chunk_tokens: int, clock: Callable[[], float]) -> None:
        self._prefill, self._store, self._clock, self._chunk_tokens = prefill, store, clock, chunk_tokens
        self._job: Job | None = None
        self._done: deque[tuple[Tokens, int, int, str | None]] = deque(maxlen=_REMEMBERED)
        """Prompt, computed from, to, whose."""
        self.tokens = 0

    @property
    def waiting(self) -> bool:
        return self._job is not None

    @property
    def began(self) -> bool:
        """It has taken over what is stored."""
        return self._job is not None and self._job.prefill.cache is not None

    def begin(self, work: Submit) -> None:
        """Replaces the pending work, if there is any."""
        self.end()
        tokens = as_tokens(work.prompt.tokens)
        self._job = Job(work, tokens, submitted=self._clock(), state=Prefilling(), idle=True)

    def step(self) -> None:
        """Computes a small chunk. What goes wrong ends this work, is logged, and raises nothing."""
        job = self._job
        if job is None:
            return
        try:
            if job.prefill.cache is None and not self._restore(job):
                self._job = None
                return
            usual = self._prefill.steps.next(job.prefill.position, shared=True)  # nobody should notice it
            self.tokens += self._prefill.chunk(job, min(self._chunk_tokens, usual))
            if job.prefill.position >= job.prefix:
                self.end()
        except Exception as error:
            log.warning("prefill in an idle gap failed", exc_info=True)
            self.forget(valid=trusted(error))

    def end(self) -> None:
        """Stops and keeps what there is."""
        job = self._job
        if job is not None and not job.is_new:
            self._prefill.keep(job)
            self._done.append((job.tokens, job.report.reused, job.prefill.position, job.work.owner))
        self.forget(valid=True)

    def give_way(self) -> None:
        """Gives back what it has taken over, and begins again once there is an idle gap. To be called when another
        model works: what is lent is counted by nobody."""
        if self._job is not None and self.began:
            self.begin(self._job.work)

    def forget(self, *, valid: bool) -> None:
        """Stops and keeps nothing new. `valid`: see `KVStore.take_back`."""
        job, self._job = self._job, None
        if job is not None:
            self._prefill.take_back(job, valid=valid)

    def share(self, job: Job, reused: int) -> int:
        """How many of the `reused` tokens of a prompt had been computed here for the same owner."""
        own = [(tokens, start, end) for tokens, start, end, owner in self._done if owner == job.work.owner]
        shares = (min(common_prefix(job.tokens, tokens), reused, end) - start for tokens, start, end in own)
        return max(0, max(shares, default=0))

    def _restore(self, job: Job) -> bool:
        """False: nothing is to be done, or there is no room for it."""
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.prefix)
        if plan.length >= job.prefix or not self._store.has_room(job.prefix - plan.length):
            return False
        job.report = replace(job.report, reused=self._prefill.restore(job, plan).length)
        return True


class Prompts:
    """`least_shared`: a shared beginning that is shorter than this is computed again rather than waited for.

    `trim_misses`: restores that were shorter than what is stored, for want of a checkpoint. `urgent`: the share of
    small questions.
    """

    def __init__(
        self,
        store: GuardedStore,
        prefill: Prefill,
        least_shared: int,
        idle_prefill: IdlePrefill,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._prefill, self._least_shared = store, prefill, least_shared
        self._idle_prefill, self._clock = idle_prefill, clock
        self._jobs: list[Job] = []
        self._turn = 0
        self.trim_misses = 0
        self.urgent = UrgentShare(clock)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def begin(self, job: Job) -> None:
        """Plans and restores, unless another job is computing more of this prompt than is stored."""
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.prefix)
        job.state, job.watched = Prefilling(), self._clock()
        job.admitted = job.admitted or job.watched
        self._jobs.append(job)
        if not self._follow(job, plan.length):
            self._restore(job, plan, joined=0)

    @property
    def question_first(self) -> bool:
        """A small question is computed now, before long prompts and beside answers that have had their time."""
        return self.urgent.goes_first and self.ends_question(math.inf)

    def ends_question(self, tokens: float) -> bool:
        """Whether so many tokens are all that a small question still needs."""
        return any(job.urgent and _left(job) <= tokens for job in self._jobs)

    def discard(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def released(self) -> list[Job]:
        """Jobs that waited for another one's KV, which is there now or will not come."""
        return [job for job in self._jobs if (followed := job.prefill.follows) is not None and followed.is_over]

    def _follow(self, job: Job, stored: int) -> bool:
        """Makes `job` wait if another one is computing more of its prompt than the `stored` tokens.

        The first one will stop where the two part.
        """
        first: Job | None = None
        reach = stored + self._least_shared
        for other in self._jobs:
            if other is job or other.prefill.follows is not None:
                continue
            shared = min(common_prefix(job.tokens, other.tokens), job.prefix, other.prefix)
            if shared > reach:
                first, reach = other, shared
        if first is None:
            return False
        job.prefill.follows, at = Followed(first, reach, stored), first.prefill
        if reach > at.position:
            at.stops = sorted({*at.stops, reach})
        return True

    def take_over(self, job: Job) -> None:
        """A job of `released` goes on from the KV that is stored by now."""
        followed = job.prefill.follows
        assert followed is not None
        first, stored = followed.job, followed.stored
        if isinstance(first.state, Prefilling):
            self._prefill.keep(first)
        plan = self._store.find(job.work.prompt, job.tokens, limit=job.prefix)
        # Who else is running a prompt now is told to its own owner only.
        is_own = first.work.owner == job.work.owner
        self._restore(job, plan, joined=plan.length - stored if is_own else 0)

    def next(self, may_decode: Callable[[Job], bool]) -> Job | None:
        """A small question before a long prompt, if questions have not had their share. Of several by turns the oldest
        and the one that is nearest to its first token.

        `may_decode`: whether a job whose prompt is done may start to decode now; else it is passed over.
        """
        here = [job for job in self._jobs if job.prefill.cache is not None]
        ready = [job for job in here if _left(job) or may_decode(job)]
        if not ready:
            return None
        first = self.urgent.goes_first  # of questions and long prompts, which of them where there are both
        ready = [job for job in ready if job.urgent == first] or ready
        self._turn += 1
        return ready[0] if self._turn % 2 else min(ready, key=_left)

    def compute(self, job: Job, step: int) -> int:
        """A chunk of at most `step` tokens. Returns the tokens done."""
        done = self._prefill.chunk(job, step)
        job.send(Progress(min(job.prefill.position + 1, len(job.tokens)), len(job.tokens), job.computed))
        now = self._clock()
        for waiting in self._jobs:  # where prefill makes progress, nobody's time runs out
            waiting.watched = now
        return done

    def _restore(self, job: Job, plan: RestorePlan, joined: int) -> None:
        """Gives the job its caches, and a new one its report. `joined`: tokens that another job computed meanwhile."""
        restored = self._prefill.restore(job, plan)
        self.trim_misses += plan.reason == "no_checkpoint"
        if job.report.prompt:
            return  # it goes on after an interruption
        if is_question(job.work, _left(job)):
            job.urgent = True
            self.urgent.came()
        if restored.length < plan.length:  # a file was damaged or gone, or the store failed; the log says which
            plan = replace(plan, matched=restored.length, reason=STORE_ERROR)
        job.report = replace(
            report_of(len(job.tokens), plan),
            reused=restored.length,
            computed=len(job.tokens) - restored.length,
            joined=max(0, min(joined, restored.length)),
            computed_idle=self._idle_prefill.share(job, restored.length),
            copied_bytes=restored.copied_bytes,
            seconds_queued=job.admitted - job.submitted,
        )
        job.send(Started(job.report))


def _left(job: Job) -> int:
    """Tokens that its prefill has not computed yet."""
    return job.prefix - job.prefill.position


def report_of(prompt: int, plan: RestorePlan) -> CacheReport:
    """Counts, with the store's part of the explanation; `chat` keeps the miss only where more was computed than new."""
    return CacheReport(
        prompt=prompt,
        reused=plan.length,
        computed=prompt - plan.length,
        new=max(0, prompt - plan.seen),
        miss=Miss(
            plan.reason or ("diverged" if plan.seen else "first_turn"),
            plan.matched,
            stored=plan.behind if plan.matched == plan.seen < prompt else (),
        ),
    )


def planned(store: GuardedStore, tokens: tuple[int, ...]) -> CacheReport:
    """What a request for this prompt would reuse now. Any thread; nobody waits for it."""
    array = as_tokens(tokens)
    return report_of(len(array), store.peek(array, limit=len(array) - 1))
