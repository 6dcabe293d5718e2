"""What is built on the model thread when the server starts: the model, its KV store, what it may use of the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.engine.asking import asker
from start_llm.engine.constraint import Grammars
from start_llm.engine.features import MEMORY_BYTES, MOST_DISK_BYTES, FeatureStore
from start_llm.engine.memory import MemoryGuard
from start_llm.engine.runtime import TextRuntime, make_store
from start_llm.engine.vision import VisionModel
from start_llm.engine.wired import wire_weights
from start_llm.kvcache.disk import DiskTier
from start_llm.models.device import Device, default_cache_bytes, default_disk_bytes, inspect_device, kv_bytes
from start_llm.models.finding import at_once, find_out, with_room
from start_llm.models.loader import LoadedModel, accelerator, load_model

GIB = 2**30


@dataclass(frozen=True)
class Built:
    """
    Attributes:
        cache_bytes: what stored KV may take in memory.
        disk: how much of it may be on disk, and where, for people; empty: none.
    """

    loaded: LoadedModel
    grammars: Grammars | None
    cache_bytes: int
    disk: str


class ModelBuilder:
    """Loads the model that the settings name. Model thread only, but for the constructor."""

    def __init__(self, settings: Settings, say: Callable[[str], None], progress: Callable[[str, float], None]) -> None:
        self._settings, self._say, self._progress = settings, say, progress

    def build(self, reserved: int = 0) -> tuple[TextRuntime, Built]:
        """`reserved`: bytes that others will take. Raises StartLLMError if the model cannot be loaded."""
        device = inspect_device(accelerator)
        loaded = self._shaped(load_model(self._settings, device, self._progress, self._say), device)
        loaded = at_once(find_out(self._settings, loaded, asker(self._settings, loaded), self._say))
        wire_weights(self._settings.wired_limit, device)
        usable, budget = max(0, device.usable - reserved), self._settings.cache_memory_bytes
        if budget is None:
            budget = default_cache_bytes(usable, loaded.weight_bytes)
        disk = self._disk(loaded)
        where = f"{self._disk_bytes() / GIB:.1f} GiB in {self._settings.disk_dir}" if disk and disk.ready else ""
        store = make_store(self._settings, loaded, budget, disk)
        guard = MemoryGuard(store, total=kv_bytes(usable, loaded.weight_bytes), most_stored=budget)
        runtime = TextRuntime(self._settings, loaded, store, guard)
        loaded = with_room(loaded, guard.most_tokens(), self._say)
        return runtime, Built(loaded, runtime.grammars, budget, where)

    def _shaped(self, loaded: LoadedModel, device: Device) -> LoadedModel:
        """A vision model in the shape of a text model; as a text model, if that cannot be done."""
        if loaded.eyes is None:
            return loaded
        try:
            return replace(loaded, model=VisionModel(loaded.model, self._features(loaded)))
        except NotSupported as error:
            self._say(f"vision    off: {error.message} The model reads text only.")
            blind = self._settings.model_copy(update={"vision": "off"})
            return load_model(blind, device, self._progress, self._say)

    def _features(self, loaded: LoadedModel) -> FeatureStore:
        """A tenth of what KV may take on disk, at most, is for what the vision tower made of images."""
        folder = self._settings.disk_dir
        if folder is None:
            return FeatureStore()
        most = min(MOST_DISK_BYTES, self._disk_bytes() // 10)
        return FeatureStore(MEMORY_BYTES, folder / "images", most, model=loaded.fingerprint)

    def _disk(self, loaded: LoadedModel) -> DiskTier | None:
        folder = self._settings.disk_dir
        if folder is None:
            return None
        disk = DiskTier(folder, loaded.fingerprint, self._disk_bytes())
        if not disk.ready:
            self._say(f"disk      KV stays in memory until this has passed: {disk.detail}")
        return disk

    def _disk_bytes(self) -> int:
        folder, limit = self._settings.disk_dir, self._settings.kv_disk_bytes
        return default_disk_bytes(folder) if limit is None and folder is not None else limit or 0
