"""Puts a loaded model, its KV store and its scheduler together. Runs on the model thread."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial

import mlx.core as mx

from start_llm.core.extras import check_installed
from start_llm.core.limits import QUANTISED_FROM
from start_llm.core.settings import Settings
from start_llm.core.work import Submit
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.drafting import Drafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.sampling import TextDrawing
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard
from start_llm.engine.schedule.scheduler import Scheduler, SchedulerLimits
from start_llm.engine.schedule.steps import DECODE_SHARE
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.events import KVEvents
from start_llm.kvcache.kinds import undescribed
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.models.background import in_background
from start_llm.models.device import PREFILL_BYTES
from start_llm.models.loader import LoadedModel
from start_llm.parsing.tools.pythonic import LLAMA

log = logging.getLogger(__name__)

WRITE_SECONDS = 20.0  # that writing the rest of the KV may take before a model is unloaded without it
WRITE_LOOK_SECONDS = 0.02
_ARRAYS_PERCENT = 60  # of the buffers that the device has room for; the rest is for weights and running requests


class TextRuntime:
    """A loaded model with its store, scheduler, drafts and grammars, as the loader makes it on the model thread.

    `drafts`: ``None``: they are off, or this model cannot have them. `made`: closes what it consists of.
    """

    def __init__(
        self,
        settings: Settings,
        loaded: LoadedModel,
        store: GuardedStore,
        memory: MemoryGuard,
        drafts: Drafts | None,
        grammars: Grammars,
        made: ExitStack,
        ranks: Ranks,
    ) -> None:
        self.loaded, self.store, self.drafts, self.grammars = loaded, store, drafts, grammars
        self.memory = memory
        bound_freed_buffers()
        self.runner = make_runner(settings, loaded, self.drafts.gate if self.drafts is not None else None, ranks)
        made.callback(self.runner.close)
        self._made = made
        step = None if settings.prefill_step_size == "auto" else settings.prefill_step_size
        store.learn(*self.runner.sample())
        self.scheduler: Scheduler = ranks.scheduler(Scheduler)(
            self.runner,
            store,
            partial(self._draw, ranks),
            limits=SchedulerLimits(
                step=step,
                deadline=settings.generation_watchdog_seconds,
                decode_share=DECODE_SHARE,
            ),
            max_concurrency=settings.max_concurrency,
            memory=memory,
            clock=ranks.clock,
        )

    def _draw(self, ranks: Ranks, work: Submit, generated: Sequence[int]) -> TextDrawing:
        """How a request's row draws, for the scheduler (`requests.Draw`). `generated`: drawn before an interruption."""
        drawing = TextDrawing(work, self.grammars, generated, self.drafts)
        drawing.sampler = ranks.sampler(drawing.sampler)
        return drawing

    def unloading(self) -> Generator[float]:
        """Brings what is stored to disk, a step at a time, then frees everything. Yields seconds to wait.

        Everything is freed where it is given up on the way, too.
        """
        try:
            for _ in self.store.leave(WRITE_SECONDS):
                yield WRITE_LOOK_SECONDS
        finally:  # also where the server ends meanwhile
            self.close()
        mx.clear_cache()

    def close(self) -> None:
        """Frees everything at once; the model's last call on the model thread."""
        for step in (self._made.close, mx.synchronize):
            try:
                step()
            except Exception:  # the thread's edge: what comes after it must be done all the same
                log.warning("closing failed", exc_info=True)


def bound_freed_buffers() -> None:
    """MLX keeps freed buffers for later, on Metal without a bound. What one chunk takes is enough to keep."""
    before = mx.set_cache_limit(PREFILL_BYTES)
    if before < PREFILL_BYTES:
        mx.set_cache_limit(before)


def end_streams() -> None:
    """The last call on the model thread; without it the process ends with a crash in a static destructor."""
    mx.synchronize()
    mx.clear_streams()


def make_runner(settings: Settings, loaded: LoadedModel, gate: DraftGate | None, ranks: Ranks) -> ModelRunner:
    """What decodes this model, as all ranks agree. Raises NotSupported: KV_BITS is set, and this model cannot."""
    quantisation, together = None, True
    if settings.kv_bits is not None:
        check_installed("mlx_vlm")
        from start_llm.engine.decode.quantised import Quantisation  # noqa: PLC0415 - takes 2 s, few need it

        quantisation = Quantisation(settings.kv_bits, settings.kv_group_size, QUANTISED_FROM)
        together = quantisation.check(loaded.model)
    together = together and not loaded.capabilities.decoding.batches
    own = [together, sorted(landmarks_of(loaded)), sorted(call_openers_of(loaded))]
    batches, landmarks, call_openers = ranks.agree(own)
    return ModelRunner(
        loaded.model,
        eos=loaded.eos,
        max_rows=settings.max_concurrency,
        gate=gate,
        quantisation=quantisation,
        batches=batches,
        landmarks=landmarks,
        call_openers=call_openers,
        ranks=ranks,
    )


def landmarks_of(loaded: LoadedModel) -> set[int]:
    """The tokens that end reasoning and that begin a call, where these are tokens of their own."""
    added = loaded.tokenizer.get_added_vocab()
    texts = [loaded.style.reasoning.end, *(opener.text for opener in loaded.style.openers(()))]
    return {added[text] for text in texts if text in added}


def call_openers_of(loaded: LoadedModel) -> set[int]:
    """The landmarks that begin a call. Empty where a call may begin without one: Llama models write plain JSON."""
    if loaded.style.tools.id == LLAMA.id:
        return set()
    return landmarks_of(loaded) - {loaded.tokenizer.get_added_vocab().get(loaded.style.reasoning.end)}


def make_store(
    settings: Settings,
    loaded: LoadedModel,
    budget_bytes: int,
    ranks: Ranks,
    disk: DiskTier | None = None,
    listener: KVEvents | None = None,
) -> Generator[float, None, GuardedStore]:
    """The model's KV store, behind its guard. The tree of what is on disk is built in the background: it holds no
    arrays yet."""
    kit = LayerKit(loaded.make_cache)
    if names := undescribed(loaded.make_cache()):
        log.warning("cache layers that nobody described are stored whole at each checkpoint: %s", ", ".join(names))
    config = StoreConfig(
        budget_bytes=budget_bytes,
        most_arrays=int(mx.device_info().get("resource_limit", 0)) * _ARRAYS_PERCENT // 100,
        ttl_seconds=settings.prompt_cache_ttl_seconds,
        session_idle_seconds=settings.prompt_cache_session_max_idle_seconds,
        sessions_keep=settings.prompt_cache_max_entries_per_session,
    )
    reuse = not loaded.capabilities.decoding.reuse  # that tells why not
    make = partial(KVStore, kit, config, disk=disk, listener=listener, clock=ranks.clock)
    store = make() if disk is None else (yield from in_background(make, KVStore.close))
    return GuardedStore(store, loaded.make_cache, reuse=ranks.agree(reuse), passing=ranks.passing)
