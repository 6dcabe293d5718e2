"""Loads models: `models` reads the weights, and a `TextRuntime` is made of them: in one shape, with what drafts for it,
looked at, with its KV store.

Knows nothing of requests, nor of who wants which model.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from start_llm.core.errors import NotSupported, Unavailable
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.drafting import make_drafts
from start_llm.engine.decode.head import add_drafter, language_of
from start_llm.engine.decode.wired import unwire, wire_weights
from start_llm.engine.probe import limit_context, probe_model
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import TextRuntime, make_store
from start_llm.engine.schedule.memory import MemoryGuard, SharedMemory
from start_llm.engine.vision import LanguageAlone, VisionModel
from start_llm.files.lru import Lru
from start_llm.kvcache.disk.tier import DiskTier, Identify
from start_llm.kvcache.events import KVEvents
from start_llm.models.adapter import StoredAdapter
from start_llm.models.background import Progress, Say, in_background, telling
from start_llm.models.checkpoint import library_of
from start_llm.models.device import LEAST_CACHE_BYTES, PREFILL_BYTES, Device, default_disk_bytes, inspect_device
from start_llm.models.fingerprint import WeightsDigest, fingerprint, tokenizer_key
from start_llm.models.loader import BasesInMemory, Found, LoadedModel, accelerator, find_model, load_steps, read_ahead
from start_llm.models.room import Weights, group_of
from start_llm.models.stepwise import bytes_of, free_memory
from start_llm.models.tokenizer import read_tokenizer

READ_AHEAD_SHARE = 0.5  # of the machine's memory: larger weights are not read ahead
_TOKENIZERS_KEPT = 2  # beside those in use


class Vocabularies:
    """Tokenizers and what grammars need of them, once for all loaded models with the same files. Any thread.

    The last ones stay though their models were unloaded: to read one with 250,000 tokens takes seconds, most of them
    with Python's lock held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[str, Grammars] = WeakValueDictionary()
        self._last: Lru[str, Grammars] = Lru(_TOKENIZERS_KEPT)

    def of(self, folder: Path) -> Grammars:
        """Of the tokenizer in `folder`; to read it takes seconds. Raises what `read_tokenizer` raises."""
        key = tokenizer_key(folder)
        with self._lock:
            found = self._held.get(key)
        if found is None:
            wrapper = read_tokenizer(folder)
            found = Grammars(wrapper, wrapper.eos_token_ids)
        with self._lock:
            self._held[key] = found
        self._last.put(key, found)
        return found


class ModelBuilder:
    """Model thread only, but for `begin`, `read`, `read_ahead` and the public figures.

    Args:
        settings: of the server; those in `read` and `steps` differ only in what is a model's own.
        reclaim: see `SharedMemory`.
        ranks: the processes that have a part of the one model each; ``None``: this one alone.

    Attributes:
        shared: what the weights and the KV of all models take. How much they may take is known from `begin` on.
        bases: weights in memory, for models that differ in their adapters only.
        stored_where: how much KV of the model that was loaded last may be on disk, and where, for people.
        told: is told what `progress` is told.
    """

    def __init__(
        self,
        settings: Settings,
        reclaim: Callable[[int], bool],
        say: Say,
        progress: Progress,
        ranks: Ranks | None = None,
    ) -> None:
        self._settings, self._say, self.ranks = settings, say, ranks or Ranks()
        self._shown = progress
        self.told: Progress = lambda step, part: None
        self.shared = SharedMemory(0, settings.cache_memory_bytes, reclaim)
        self._device: Device
        self.bases = BasesInMemory()
        self.stored_where = ""
        self._vocabularies = Vocabularies()
        self._wired = False
        self._side: dict[str, Any] = {}  # models that are no language models

    def begin(self, reserved: int) -> None:
        """Looks at the machine. Before the first load, on any thread. `reserved`: bytes that no model may have."""
        device, most = inspect_device(accelerator), self._settings.pool_memory_bytes
        self._device = device if most is None else replace(device, usable=min(most, device.usable or most))
        self.shared.usable = max(1, self._device.usable - reserved) if self._device.usable else 0

    def read(self, settings: Settings, folder: Path | None = None, adapter: StoredAdapter | None = None) -> Found:
        """All of a model but its weights, as `find_model` says. Loader thread; model thread in `first_steps`."""
        return find_model(
            settings,
            self._device,
            self._progress,
            self._say,
            folder=folder,
            adapter=None if adapter is None else adapter.read(),
            read=lambda there: self._vocabularies.of(there).wrapper,
            parts=self.ranks.size,
        )

    def _progress(self, step: str, part: float) -> None:
        self.told(step, part)
        self._shown(step, part)

    def read_ahead(self, folder: Path, name: str) -> None:
        """Into the system's memory, if no model has them. Not the model thread. `name`: for people."""
        if group_of(folder) not in self.bases:
            read_ahead(folder, int(self._device.memory * READ_AHEAD_SHARE), self._progress, name)

    def _begin(self, model: str, weights: Weights, made: ExitStack) -> None:
        """A model is going to be loaded, and to take about these weights. `made` closes what it consists of."""
        self._unwire()
        made.callback(self._left, model)
        self.shared.place(model, weights)

    def _left(self, model: str) -> None:
        """Its weights are in memory no more."""
        self._unwire()
        self.shared.place(model, None)

    def side_steps(
        self, model: str, weights: Weights, steps: Generator[float, None, Any]
    ) -> Generator[float, None, Any]:
        """Runs `steps`, which load what is no language model: its `nbytes` count, it has no KV. `weights`: a guess."""
        with ExitStack() as made:
            self._begin(model, weights, made)
            found = self._side[model] = yield from steps
            self.shared.place(model, Weights(found.nbytes))
            made.pop_all()
        return found

    def side_unloading(self, model: str) -> Generator[float]:
        """Frees what `side_steps` has loaded. Nobody else holds it any more."""
        self._side.pop(model, None)
        yield 0.0
        free_memory()
        self._left(model)

    def first_steps(
        self, settings: Settings, model: str = "", listener: KVEvents | None = None
    ) -> Generator[float, None, TextRuntime]:
        """`steps` of the model that the server starts with. All ranks wait for each other, then it is looked for."""
        self.shared.usable = self.ranks.connect(self.shared.usable)
        return (yield from self.steps(settings, self.read(settings), model, Weights(), listener))

    def steps(
        self,
        settings: Settings,
        found: Found,
        model: str,
        weights: Weights,
        listener: KVEvents | None = None,
        pinned: Sequence[Weights] = (),
    ) -> Generator[float, None, TextRuntime]:
        """Loads the model of `settings`, some weights at a step. Raises StartLLMError if it cannot be served.

        Args:
            found: by `read`.
            model: its name on the model thread.
            weights: what it is going to take, as far as that is known.
            listener: is told what its KV store gives up.
            pinned: of models that never go for this one.
        """
        made = ExitStack()
        try:
            self._begin(model, weights, made)
            if self.ranks.agree(found.files) != found.files:
                raise Unavailable(f"The files of {found.source} are other ones here than on the first host.")
            reading = _Reading(found, self.bases, self.ranks, self._progress, self._say)
            loaded = yield from reading.model()
            self.shared.place(model, loaded.weights)
            loaded = yield from reading.with_drafter(loaded, self.shared)
            self.shared.place(model, loaded.weights)
            with telling(self._progress, f"looking what {loaded.name} can do"):
                loaded = yield from probe_model(self._settings, loaded, self._say, alone=self.ranks.alone)
            if not self.shared.guards:
                self._wired = wire_weights(settings.wired_limit, self._device)
            open_disk = partial(self._disk, settings, loaded.fingerprint, found.digest)
            disk = yield from in_background(open_disk, _close)
            made.callback(_close, disk)
            store = yield from make_store(settings, loaded, self.shared.most_stored, self.ranks, disk, listener)
            made.callback(store.close)
            self.stored_where = "nothing on disk"
            if disk is not None and disk.ready:
                self.stored_where = f"{as_size(disk.max_bytes)} in {settings.disk_dir}"
            memory = MemoryGuard(store, self.shared)
            made.callback(memory.close)
            grammars = yield from in_background(lambda: self._vocabularies.of(loaded.folder))
            drafts = None
            if settings.drafts != "off":
                drafts = make_drafts(loaded.model, loaded.make_cache, self.ranks)
                made.callback(_close, drafts)
            runtime = TextRuntime(settings, loaded, store, memory, drafts, grammars, made, self.ranks)
            runtime.loaded = limit_context(loaded, memory.most_tokens(model, pinned), self._say)
            self.ranks.loaded()
            return runtime
        except BaseException:
            made.close()
            raise

    def _disk(self, settings: Settings, fingerprint: str, digest: WeightsDigest | None) -> DiskTier | None:
        """Its KV's place on disk, open once all weights were read. ``None``: it has none. Background thread."""
        if digest is None:
            return None
        whose: str | Identify = f"{fingerprint} {digest.value}"
        if not digest.value:
            whose = partial(_identified, fingerprint, digest)
            self._say("disk      KV goes there once all bytes of the weights have been read, this first time")
        most = default_disk_bytes(digest.folder) if settings.kv_disk_bytes is None else settings.kv_disk_bytes
        return DiskTier(digest.folder, whose, most)

    def _unwire(self) -> None:
        if self._wired:
            self._wired = False
            unwire()


class _Reading:
    """Reads one model, and what drafts for it, in the shape of a model of mlx-lm. Model thread only."""

    def __init__(self, found: Found, bases: BasesInMemory, ranks: Ranks, progress: Progress, say: Say) -> None:
        self._found = found
        self._bases, self._ranks, self._progress, self._say = bases, ranks, progress, say

    def model(self) -> Generator[float, None, LoadedModel]:
        """Reads it; without its vision part, if that cannot be done. Raises what `load_steps` raises."""
        found = self._found
        if found.sees:
            try:
                return (yield from self._seeing())
            except NotSupported as error:
                self._say(f"vision    off: {error.message.rstrip('.')}; the model reads text only")
            found = replace(found, sees=False)
        loaded = yield from load_steps(found, self._progress, self._say, self._bases, self._ranks.shard)
        alone = library_of(loaded.capabilities.config) == "mlx-vlm"
        return replace(loaded, model=LanguageAlone(loaded.model)) if alone else loaded

    def _seeing(self) -> Generator[float, None, LoadedModel]:
        """Raises NotSupported; nobody holds the arrays then."""
        loaded = yield from load_steps(self._found, self._progress, self._say, self._bases)
        assert loaded.vision is not None, "it sees"
        return replace(loaded, model=VisionModel(loaded.model, loaded.vision.pad))

    def with_drafter(self, loaded: LoadedModel, shared: SharedMemory) -> Generator[float, None, LoadedModel]:
        """With what drafts for it, if that fits into memory and to the model; else people are told why."""
        if (files := self._found.drafter) is None:
            return loaded
        free = max(0, shared.usable - shared.weight_bytes - PREFILL_BYTES - LEAST_CACHE_BYTES)
        try:
            if shared.usable and files.nbytes > free:
                sizes = f"its weights take {as_size(files.nbytes)}, and {as_size(free)} are free"
                raise NotSupported(f"{sizes} beside the model and the least that a prefill and KV need")
            model = yield from add_drafter(loaded.model, language_of(loaded.model), files, self._found.trust_code)
        except NotSupported as error:
            self._say(f"drafts    {files.detail} does not draft for {loaded.name}: {error.message}")
            return loaded
        self._say(f"drafts    {files.detail} drafts for {loaded.name}")
        key = f"{loaded.fingerprint}-drafter-{fingerprint(files.folder)}"
        size = loaded.weight_bytes + bytes_of(model.drafter)
        key = hashlib.sha256(key.encode()).hexdigest()
        return replace(loaded, model=model, fingerprint=key, weight_bytes=size)


def _identified(fingerprint: str, weights: WeightsDigest, is_over: Callable[[], bool]) -> str:
    found = weights.compute(is_over)
    return f"{fingerprint} {found}" if found else ""


def _close(opened: Any) -> None:
    """What is closed already may be closed again; ``None``: there is nothing."""
    if opened is not None:
        opened.close()
