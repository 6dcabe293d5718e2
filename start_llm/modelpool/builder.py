"""What is built on the model thread when a model is loaded: the model, its KV store, what it may use of the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from start_llm.audio.transcription import free_memory
from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.engine.asking import asker
from start_llm.engine.decode.costs import CostTable
from start_llm.engine.decode.drafting import KNOWN_COSTS
from start_llm.engine.decode.wired import unwire, wire_weights
from start_llm.engine.features import MEMORY_BYTES, MOST_DISK_BYTES, FeatureStore
from start_llm.engine.runtime import TextRuntime, drafts_for, make_store
from start_llm.engine.schedule.memory import MemoryGuard, Pooled
from start_llm.engine.vision import VisionModel
from start_llm.files.lru import Lru
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.modelpool.vocabularies import Vocabularies, Vocabulary
from start_llm.models.adapter import Adapter
from start_llm.models.adapters import Chosen
from start_llm.models.background import in_background
from start_llm.models.device import GIB, Device, default_disk_bytes, inspect_device
from start_llm.models.inspection import inspect_once
from start_llm.models.loader import (
    LoadedModel,
    LoadInputs,
    accelerator,
    load_model,
    load_steps,
    read_ahead,
)
from start_llm.models.probe import limit_context, probe_model
from start_llm.models.room import Weights
from start_llm.models.weights import BasesInMemory, group_of

log = logging.getLogger(__name__)

READ_AHEAD_SHARE = 0.5  # of the machine's memory: larger weights are not read ahead


@dataclass(frozen=True)
class Built:
    """
    Attributes:
        cache_bytes: what stored KV of all models may take in memory.
        disk: how much of it may be on disk, and where, for people; empty: none.
        kv_bytes: what it takes now. Any thread.
    """

    loaded: LoadedModel
    vocabulary: Vocabulary
    cache_bytes: int
    disk: str
    kv_bytes: Callable[[], int]


@dataclass(frozen=True)
class PreloadedFiles:
    """What another thread has read of a model, so that the model thread need not."""

    folder: Path
    vocabulary: Vocabulary
    adapter: Adapter | None = None


class Guest(Protocol):
    """A loaded model that is no language model."""

    nbytes: int
    """What its weights take."""


class ModelBuilder:
    """Loads models. Model thread only, but for the constructor and `read`.

    Args:
        reclaim, staying: see `Pooled`.

    Attributes:
        bases: weights that are in memory, for models that differ in their adapters only. Any thread.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        progress: Callable[[str, float], None],
        reclaim: Callable[[int], bool],
        staying: Callable[[str], Sequence[Weights]],
    ) -> None:
        self._settings, self._say, self._progress = settings, say, progress
        self._reclaim, self._staying = reclaim, staying
        self._device: Device | None = None
        self._shared: Pooled | None = None
        self._wired = False
        self._reserved = 0
        self.bases = BasesInMemory()
        self._vocabularies = Vocabularies()
        self._costs: Lru[str, CostTable] = Lru(KNOWN_COSTS)

    @property
    def usable(self) -> int:
        """Bytes that all models may take; 0: nobody knows. Once the first is loaded; any thread."""
        return 0 if self._device is None else self._left_to_us(self._device)

    @property
    def running(self) -> int:
        """Bytes of KV of running requests. Any thread."""
        return 0 if self._shared is None else self._shared.running

    @property
    def weight_bytes(self) -> int:
        """What the weights of all models take. Any thread."""
        return 0 if self._shared is None else self._shared.weight_bytes

    def first(self, reserved: int = 0) -> Generator[float, None, tuple[TextRuntime, Built]]:
        """The first model. Raises StartLLMError if it cannot be loaded.

        Args:
            reserved: bytes that others will take, who are not of the pool.
        """
        self._reserved = reserved
        built: list[Built] = []
        runtime = yield from self.steps(self._settings, "", Weights(), built.append)
        try:
            built[0].vocabulary.grammars.make_vocabulary()  # nobody waits for the model thread yet
        except NotSupported as error:
            log.warning("%s", error.message)
        return runtime, built[0]

    def read(self, settings: Settings, folder: Path, eos: Any, adapter: Chosen | None = None) -> PreloadedFiles:
        """What needs no MLX, and little memory. Any thread but the model thread.

        Raises NotFound, BadRequest, NotSupported.
        """
        if settings.model_path is not None:
            inspect_once(settings, settings.model_path, folder)
        read = None if adapter is None else adapter.read()
        return PreloadedFiles(folder, self._vocabularies.read(folder, eos), read)

    def read_weights(self, folder: Path, moved: Callable[[], None]) -> None:
        """Into the system's memory, if no model has them. Not the model thread. `moved` is called now and then."""
        if self.bases.find(group_of(folder)) is not None:
            return
        device = inspect_device(accelerator)
        read_ahead(folder, int(device.memory * READ_AHEAD_SHARE), moved)

    def steps(
        self,
        settings: Settings,
        model: str,
        weights: Weights,
        done: Callable[[Built], None],
        ahead: PreloadedFiles | None = None,
    ) -> Generator[float, None, TextRuntime]:
        """Loads the model of `settings`, a layer at a step. Raises StartLLMError if it cannot be loaded.

        Args:
            model: its name on the model thread.
            weights: what it is going to take, as far as that is known.
        """
        device, shared = self._machine()
        self._unwire()
        with ExitStack() as made:  # what has to be closed if it comes to nothing, the last one first
            made.callback(self._left, model)
            shared.place(model, weights)
            given = self._given(ahead)
            loaded = yield from load_steps(settings, device, self._progress, self._say, given)
            loaded = self._shaped(settings, loaded, device)
            shared.place(model, loaded.weights)
            loaded = yield from probe_model(settings, loaded, asker(settings, loaded), self._say)
            if len(shared) == 0:
                self._wired = wire_weights(settings.wired_limit, device)
            yield 0.0
            vocabulary = self._vocabularies.of(loaded.wrapper)
            drafts = yield from drafts_for(settings, loaded, self._costs)
            if drafts is not None:
                made.callback(drafts.close)
            disk = yield from in_background(lambda: self._disk(settings, loaded), _close)
            made.callback(_close, disk)
            store = yield from make_store(settings, loaded, shared.most_stored, disk)
            made.callback(_close, store)
            guard = MemoryGuard(store, shared=shared)
            made.callback(_close, guard)
            runtime = TextRuntime(
                settings, loaded, store, guard, drafts, vocabulary.grammars, lambda: self._left(model)
            )
            made.pop_all()
            made.callback(runtime.close)
            loaded = limit_context(loaded, guard.most_tokens(model), self._say)
            where = f"{self._disk_bytes(settings) / GIB:.1f} GiB in {settings.disk_dir}" if disk and disk.ready else ""
            done(Built(loaded, vocabulary, shared.most_stored, where, lambda: store.nbytes))
            made.pop_all()
        return runtime

    def guest[T: Guest](
        self, model: str, weights: Weights, steps: Generator[float, None, T]
    ) -> Generator[float, None, T]:
        """Loads by `steps` what is no language model: its weights count, and it has no KV.

        Args:
            weights: what it is going to take, as far as that is known.
        """
        _, shared = self._machine()
        self._unwire()
        shared.place(model, weights)
        try:
            found = yield from steps
        except BaseException:
            self._left(model)
            raise
        shared.place(model, Weights(found.nbytes))
        return found

    def guest_leaves(self, model: str, held: list[Any]) -> Generator[float]:
        """`held`: what holds its arrays; it is emptied."""
        held.clear()
        yield 0.0
        free_memory()
        self._left(model)

    def _given(self, ahead: PreloadedFiles | None) -> LoadInputs:
        if ahead is None:
            return LoadInputs(lambda folder, eos: self._vocabularies.read(folder, eos).wrapper, bases=self.bases)
        return LoadInputs(lambda folder, eos: ahead.vocabulary.wrapper, ahead.folder, ahead.adapter, self.bases)

    def _machine(self) -> tuple[Device, Pooled]:
        if self._device is None or self._shared is None:
            device, most = inspect_device(accelerator), self._settings.pool_memory_bytes
            if most is not None:
                device = replace(device, usable=min(most, device.usable or most))
            self._device = device
            most_stored = self._settings.cache_memory_bytes
            self._shared = Pooled(self._left_to_us(device), most_stored, self._reclaim, self._staying)
        return self._device, self._shared

    def _left_to_us(self, device: Device) -> int:
        return max(1, device.usable - self._reserved) if device.usable else 0

    def _left(self, model: str) -> None:
        self._unwire()
        if self._shared is not None:
            self._shared.leave(model)

    def _unwire(self) -> None:
        if self._wired:
            self._wired = False
            unwire()

    def _shaped(self, settings: Settings, loaded: LoadedModel, device: Device) -> LoadedModel:
        """A vision model in the shape of a text model; as a text model, if that cannot be done."""
        if loaded.vision is None:
            return loaded
        try:
            return replace(loaded, model=VisionModel(loaded.model, self._features(settings, loaded)))
        except NotSupported as error:
            self._say(f"vision    off: {error.message} The model reads text only.")
            blind = settings.model_copy(update={"vision": "off"})
            return load_model(blind, device, self._progress, self._say, self._given(None))

    def _features(self, settings: Settings, loaded: LoadedModel) -> FeatureStore:
        """A tenth of what KV may take on disk, at most, is for what the vision tower made of images."""
        folder = settings.disk_dir
        if folder is None:
            return FeatureStore()
        most = min(MOST_DISK_BYTES, self._disk_bytes(settings) // 10)
        return FeatureStore(MEMORY_BYTES, folder / "images", most, model=loaded.fingerprint)

    def _disk(self, settings: Settings, loaded: LoadedModel) -> DiskTier | None:
        folder = settings.disk_dir
        if folder is None:
            return None
        disk = DiskTier(folder, loaded.fingerprint, self._disk_bytes(settings))
        if not disk.ready:
            self._say(f"disk      KV stays in memory until this has passed: {disk.detail}")
        return disk

    def _disk_bytes(self, settings: Settings) -> int:
        folder, limit = settings.disk_dir, settings.kv_disk_bytes
        return default_disk_bytes(folder) if limit is None and folder is not None else limit or 0


def _close(opened: Any) -> None:
    """What is closed already may be closed again; ``None``: there is nothing."""
    if opened is not None:
        opened.close()
