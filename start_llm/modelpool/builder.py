"""What is built on the model thread when a model is loaded: the model, its KV store, what it may use of the memory.

Knows nothing of requests, nor of who wants which model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

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
from start_llm.modelpool.vocabularies import Vocabularies
from start_llm.models.adapters import Chosen
from start_llm.models.background import in_background
from start_llm.models.device import GIB, Device, default_disk_bytes, inspect_device
from start_llm.models.inspection import inspect_once
from start_llm.models.loader import LoadedModel, LoadInputs, accelerator, load_model, load_steps, read_ahead
from start_llm.models.probe import limit_context, probe_model
from start_llm.models.room import Weights
from start_llm.models.stepwise import free_memory
from start_llm.models.weights import BasesInMemory, group_of

READ_AHEAD_SHARE = 0.5  # of the machine's memory: larger weights are not read ahead


class SideModel(Protocol):
    """A loaded model that is no language model."""

    nbytes: int
    """What its weights take of the memory that models share."""


class MemoryOwner(Protocol):
    """Who unloads models for memory, see `registry.ModelRegistry`."""

    def reclaim(self, need: int) -> bool: ...

    def pinned_weights(self, key: str) -> Sequence[Weights]: ...


class ModelBuilder:
    """Loads models. Model thread only, but for the constructor and `read`.

    Attributes:
        bases: weights that are in memory, for models that differ in their adapters only. Any thread.
        reserved: bytes that others will take, who have no part in what models share. Set before the first load.
        stored_where: how much KV of the model that was loaded last may be on disk, and where, for people.
    """

    def __init__(
        self,
        settings: Settings,
        registry: MemoryOwner,
        say: Callable[[str], None],
        progress: Callable[[str, float], None],
    ) -> None:
        self._settings, self._registry, self._say, self._progress = settings, registry, say, progress
        self._device: Device | None = None
        self._shared: Pooled | None = None
        self._side: dict[str, SideModel] = {}
        self._wired = False
        self.reserved, self.stored_where = 0, ""
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

    @property
    def stored_bytes(self) -> int:
        """What stored KV of all models may take in memory. Once the first is loaded; any thread."""
        return 0 if self._shared is None else self._shared.most_stored

    def read(self, settings: Settings, folder: Path, eos: Any, adapter: Chosen | None = None) -> LoadInputs:
        """What needs no MLX, and little memory. Any thread but the model thread.

        Raises NotFound, BadRequest, NotSupported.
        """
        if settings.model_path is not None:
            inspect_once(settings, settings.model_path, folder)
        read, vocabulary = None if adapter is None else adapter.read(), self._vocabularies.read(folder, eos)
        return LoadInputs(lambda folder, eos: vocabulary.wrapper, folder, read, self.bases)

    def read_weights(self, folder: Path, moved: Callable[[], None]) -> None:
        """Into the system's memory, if no model has them. Not the model thread. `moved` is called now and then."""
        if self.bases.find(group_of(folder)) is not None:
            return
        device = inspect_device(accelerator)
        read_ahead(folder, int(device.memory * READ_AHEAD_SHARE), moved)

    def steps(
        self, settings: Settings, model: str, weights: Weights, inputs: LoadInputs | None = None
    ) -> Generator[float, None, TextRuntime]:
        """Loads the model of `settings`, a layer at a step. Raises StartLLMError if it cannot be loaded.

        Args:
            model: its name on the model thread.
            weights: what it is going to take, as far as that is known.
            inputs: what `read` has read of it; ``None``: its files are still to be found.
        """
        device, shared = self._machine()
        self._unwire()
        with ExitStack() as made:  # what has to be closed if it comes to nothing, the last one first
            made.callback(self._left, model)
            shared.place(model, weights)
            inputs = inputs or self._plain_inputs()
            loaded = yield from load_steps(settings, device, self._progress, self._say, inputs)
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
            runtime.loaded = limit_context(loaded, guard.most_tokens(model), self._say)
            where = f"{self._disk_bytes(settings) / GIB:.1f} GiB in {settings.disk_dir}"
            self.stored_where = where if disk and disk.ready else "nothing on disk"
            made.pop_all()
        return runtime

    def side_steps[T: SideModel](
        self, model: str, weights: Weights, steps: Generator[float, None, T]
    ) -> Generator[float, None, T]:
        """Loads by `steps` what is no language model: its weights count, and it has no KV. Arguments as of `steps`."""
        _, shared = self._machine()
        self._unwire()
        shared.place(model, weights)
        try:
            found = yield from steps
        except BaseException:
            self._left(model)
            raise
        shared.place(model, Weights(found.nbytes))
        self._side[model] = found
        return found

    def side_unloading(self, model: str) -> Generator[float]:
        """Frees what `side_steps` has loaded. Nobody else holds it any more."""
        self._side.pop(model, None)
        yield 0.0
        free_memory()
        self._left(model)

    def _plain_inputs(self) -> LoadInputs:
        return LoadInputs(lambda folder, eos: self._vocabularies.read(folder, eos).wrapper, bases=self.bases)

    def _machine(self) -> tuple[Device, Pooled]:
        if self._device is None or self._shared is None:
            device, most = inspect_device(accelerator), self._settings.pool_memory_bytes
            if most is not None:
                device = replace(device, usable=min(most, device.usable or most))
            self._device = device
            most_stored = self._settings.cache_memory_bytes
            reclaim, staying = self._registry.reclaim, self._registry.pinned_weights
            self._shared = Pooled(self._left_to_us(device), most_stored, reclaim, staying)
        return self._device, self._shared

    def _left_to_us(self, device: Device) -> int:
        return max(1, device.usable - self.reserved) if device.usable else 0

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
            return load_model(blind, device, self._progress, self._say, self._plain_inputs())

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
