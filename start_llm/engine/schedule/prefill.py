"""A prompt's way through the model, chunk by chunk. Model thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import Cache
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.jobs import Job
from start_llm.engine.schedule.steps import StepSize
from start_llm.kvcache.blocks import TokenSequence


class Prefill:
    """Computes prompts and hands their KV to the store.

    Attributes:
        tokens: prompt tokens that went through the model.
        seconds_per_token: moving average of what one costs; eviction weighs KV by it.
    """

    def __init__(self, runner: ModelRunner, store: GuardedStore, steps: StepSize, clock: Callable[[], float]) -> None:
        self._runner, self._store, self._steps, self._clock = runner, store, steps, clock
        self.tokens = 0
        self.seconds_per_token = 0.0

    def chunk(self, job: Job, step: int) -> int:
        """Prefills up to `step` tokens, no further than the next pause; stores at a pause. Returns the tokens done."""
        assert job.cache is not None
        before = job.position
        end = min(before + step, job.until)
        while job.pauses and job.pauses[0] <= before:
            job.pauses.pop(0)
        if job.pauses:
            end = min(end, job.pauses[0])
        end = _whole_images(job, before, end)
        if end > before:
            began = self._clock()
            images = [
                replace(image, start=image.start - before)
                for image in job.work.prompt.images
                if before <= image.start < end
            ]
            nbytes = self._runner.prefill(job.cache, job.tokens[before:end].tolist(), images)
            seconds = self._clock() - began
            self._measure(end - before, seconds)
            self._steps.measure(end - before, end, seconds, nbytes)
            job.prefilled(end - before)
        if job.pauses and job.position == job.pauses[0]:
            job.pauses.pop(0)
            self.keep(job)
        return end - before

    def short_step(self, job: Job, most: int) -> int:
        """Tokens of a chunk that nobody should notice: at most so many, and under half a second."""
        return min(most, self._steps.next(job.position, shared=True))

    def keep(self, job: Job, *, checkpoint: bool = True) -> None:
        """Stores what the job's prefill has computed so far."""
        if job.cache is not None:
            head = job.position == job.work.prompt.head
            self.store(job, job.tokens[: job.position], job.cache, checkpoint=checkpoint, head=head)

    def store(self, job: Job, tokens: TokenSequence, cache: Cache, **about: Any) -> None:
        """Stores KV that belongs to the job: `cache` holds exactly `tokens`."""
        self._store.put(
            tokens,
            cache,
            session=job.work.session,
            one_shot=job.work.one_shot,
            seconds_per_token=self.seconds_per_token,
            **about,
        )

    def _measure(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        cost = seconds / tokens
        self.seconds_per_token = cost if not self.seconds_per_token else 0.8 * self.seconds_per_token + 0.2 * cost


def _whole_images(job: Job, before: int, end: int) -> int:
    """`end`, moved so that it cuts no image in two: in front of the image, or behind it if the chunk begins with it."""
    image = job.work.prompt.image_at(end)
    if image is None:
        return end
    return image.start if image.start > before else image.end
