"""Loads models on the model thread: `models` reads the weights, `engine` makes a runtime of them.

Knows nothing of requests, nor of who wants which model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from start_llm.core.settings import Settings
from start_llm.engine.assembly import Assembly
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.schedule.memory import SharedMemory
from start_llm.kvcache.events import KVListener
from start_llm.modelpool.registry import ModelRegistry
from start_llm.models.adapter import StoredAdapter
from start_llm.models.background import Progress, Say
from start_llm.models.device import Device, inspect_device
from start_llm.models.inspection import inspect_once
from start_llm.models.loader import LoadInputs, accelerator, read_ahead
from start_llm.models.room import Weights, group_of
from start_llm.models.stepwise import free_memory

READ_AHEAD_SHARE = 0.5  # of the machine's memory: larger weights are not read ahead


class ModelBuilder:
    """Loads models. Model thread only, but for `begin`, `read`, `read_ahead` and the public figures."""

    def __init__(self, registry: ModelRegistry, say: Say, progress: Progress, ranks: Ranks | None = None) -> None:
        """`ranks`: the processes that have a part of the one model each; ``None``: this one alone."""
        self.ranks = ranks or Ranks()
        self._settings = registry.settings
        self._registry = registry
        self._device: Device
        # What the weights and the KV of all models take. How much they may take is known from `begin` on.
        self.shared = SharedMemory(0, registry.settings.cache_memory_bytes, registry.reclaim)
        self._side: dict[str, Any] = {}
        self.assembly = Assembly(self.shared, self.ranks, say, progress)
        self.bases = self.assembly.bases

    def begin(self, reserved: int) -> None:
        """Looks at the machine. Before the first load, on any thread. `reserved`: bytes that no model may have."""
        device, most = inspect_device(accelerator), self._settings.pool_memory_bytes
        device = device if most is None else replace(device, usable=min(most, device.usable or most))
        self.shared.usable = max(1, device.usable - reserved) if device.usable else 0
        self._device = self.assembly.device = device

    def read(self, settings: Settings, folder: Path, adapter: StoredAdapter | None = None) -> LoadInputs:
        """What needs no MLX, and little memory. Not the model thread. Raises NotFound, BadRequest, NotSupported."""
        if settings.model_path is not None:
            inspect_once(settings, settings.model_path, folder)
        read, grammars = None if adapter is None else adapter.read(), self.assembly.vocabularies.of(folder)
        return LoadInputs(grammars.wrapper, folder, read, self.bases)

    def read_ahead(self, folder: Path, moved: Callable[[], None]) -> None:
        """Into the system's memory, if no model has them. Not the model thread. `moved` is called now and then."""
        if group_of(folder) not in self.bases:
            read_ahead(folder, int(self._device.memory * READ_AHEAD_SHARE), moved)

    def steps(
        self,
        settings: Settings,
        model: str,
        weights: Weights,
        inputs: LoadInputs | None = None,
        listener: KVListener | None = None,
    ) -> Generator[float, None, TextRuntime]:
        """See `Assembly.steps`. `inputs`: what `read` has read of it."""
        pinned = self._registry.pinned_weights(model)
        return (yield from self.assembly.steps(settings, model, weights, pinned, inputs, listener))

    def side_steps(
        self, model: str, weights: Weights, steps: Generator[float, None, Any]
    ) -> Generator[float, None, Any]:
        """Loads by `steps` what is no language model: its `nbytes` count, and it has no KV. Arguments as of `steps`."""
        made = ExitStack()
        try:
            self.assembly.begin(model, weights, made)
            found = yield from steps
        except BaseException:
            made.close()
            raise
        self.shared.place(model, Weights(found.nbytes))
        self._side[model] = found
        return found

    def side_unloading(self, model: str) -> Generator[float]:
        """Frees what `side_steps` has loaded. Nobody else holds it any more."""
        self._side.pop(model, None)
        yield 0.0
        free_memory()
        self.assembly.left(model)
