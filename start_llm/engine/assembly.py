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
from start_llm.engine import checks
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.drafting import Drafts, make_drafts
from start_llm.engine.decode.head import add_drafter, language_of
from start_llm.engine.decode.wired import unwire, wire_weights
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import TextRuntime, make_store
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.memory import MemoryGuard, SharedMemory
from start_llm.engine.vision import LanguageAlone, VisionModel
from start_llm.files.lru import Lru
from start_llm.host.home import command
from start_llm.kvcache.disk.tier import DiskTier, Identify
from start_llm.kvcache.events import KVListener
from start_llm.models.adapter import StoredAdapter
from start_llm.models.background import Progress, Say, in_background
from start_llm.models.catalog import name_of
from start_llm.models.checkpoint import LIBRARY_ERRORS, library_of, read_config
from start_llm.models.device import GIB, LEAST_CACHE_BYTES, PREFILL_BYTES, Device, default_disk_bytes, inspect_device
from start_llm.models.drafters import DrafterFiles, find_drafter, other_vocabulary
from start_llm.models.fingerprint import WeightsDigest, fingerprint, stamps_of, tokenizer_key
from start_llm.models.inspection import inspect_once
from start_llm.models.loader import (
    BasesInMemory,
    LoadedModel,
    LoadInputs,
    accelerator,
    load_model,
    load_steps,
    read_ahead,
)
from start_llm.models.probe import limit_context, probe_model
from start_llm.models.recommended import published_head
from start_llm.models.room import Weights, group_of
from start_llm.models.stepwise import bytes_of, free_memory
from start_llm.models.tokenizer import read_tokenizer
from start_llm.models.tool_probe import ASKED, SECONDS, TOKENS

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

    def of(self, folder: Path, wrapper: Any = None) -> Grammars:
        """`wrapper`: the tokenizer, if it was read from this folder already. Raises what `read_tokenizer` raises."""
        key = tokenizer_key(folder)
        with self._lock:
            found = self._held.get(key)
        if found is None:
            wrapper = wrapper or read_tokenizer(folder)
            found = Grammars(wrapper, wrapper.eos_token_ids)
        with self._lock:
            self._held[key] = found
        self._last.put(key, found)
        return found


class ModelBuilder:
    """Model thread only, but for `begin`, `read`, `read_ahead` and the public figures.

    Args:
        settings: of the server.
        reclaim: see `SharedMemory`.
        ranks: the processes that have a part of the one model each; ``None``: this one alone.

    Attributes:
        shared: what the weights and the KV of all models take. How much they may take is known from `begin` on.
        bases: weights in memory, for models that differ in their adapters only.
        stored_where: how much KV of the model that was loaded last may be on disk, and where, for people.
    """

    def __init__(
        self,
        settings: Settings,
        reclaim: Callable[[int], bool],
        say: Say,
        progress: Progress,
        ranks: Ranks | None = None,
    ) -> None:
        self._settings, self._say, self._progress, self.ranks = settings, say, progress, ranks or Ranks()
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

    def read(self, settings: Settings, folder: Path, adapter: StoredAdapter | None = None) -> LoadInputs:
        """What needs no MLX, and little memory. Not the model thread. Raises NotFound, BadRequest, NotSupported."""
        if settings.model_path is not None:
            inspect_once(settings, settings.model_path, folder)
        read, grammars = None if adapter is None else adapter.read(), self._vocabularies.of(folder)
        return LoadInputs(grammars.wrapper, folder, read, self.bases)

    def read_ahead(self, folder: Path, moved: Callable[[], None]) -> None:
        """Into the system's memory, if no model has them. Not the model thread. `moved` is called now and then."""
        if group_of(folder) not in self.bases:
            read_ahead(folder, int(self._device.memory * READ_AHEAD_SHARE), moved)

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
        """Loads by `steps` what is no language model: its `nbytes` count, and it has no KV. Arguments as of `steps`."""
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

    def steps(
        self,
        settings: Settings,
        model: str,
        weights: Weights,
        inputs: LoadInputs | None = None,
        listener: KVListener | None = None,
        pinned: Sequence[Weights] = (),
    ) -> Generator[float, None, TextRuntime]:
        """Loads the model of `settings`, some weights at a step. Raises StartLLMError if it cannot be served.

        Args:
            model: its name on the model thread.
            weights: what it is going to take, as far as that is known.
            inputs: what `read` has read of it; ``None``: its files are still to be found.
            listener: is told what its KV store gives up.
            pinned: of models that never go for this one.
        """
        made = ExitStack()
        self.shared.usable = self.ranks.connect(self.shared.usable)
        try:
            self._begin(model, weights, made)
            inputs = inputs or LoadInputs(bases=self.bases, parts=self.ranks.size, shard=self.ranks.shard)
            loaded = yield from load_steps(settings, self._device, self._progress, self._say, inputs)
            if not self.ranks.alone and self.ranks.agree(own := fingerprint(loaded.folder)) != own:
                raise Unavailable(f"The files of {loaded.source} are other ones here than on the first host.")
            return (yield from self._runtime(settings, loaded, model, pinned, listener, made))
        except BaseException:
            made.close()
            raise

    def _runtime(
        self,
        settings: Settings,
        loaded: LoadedModel,
        model: str,
        pinned: Sequence[Weights],
        listener: KVListener | None,
        made: ExitStack,
    ) -> Generator[float, None, TextRuntime]:
        """Of a model whose weights are read."""
        loaded = self._shaped(settings, loaded)
        self.shared.place(model, loaded.weights)
        loaded = yield from self._with_drafter(settings, loaded)
        self.shared.place(model, loaded.weights)
        ask = partial(checks.greedy, loaded.model, eos=loaded.eos, most=TOKENS, seconds=SECONDS)
        text = loaded.tokenizer.encode(ASKED.content, add_special_tokens=False)
        whole = partial(checks.check_decoding, loaded.model, loaded.make_cache, text)
        check = whole if self.ranks.alone else None
        asks = settings.model_probe != "off"
        loaded = yield from probe_model(settings, loaded, ask if asks else None, check, self._say)
        drafts, grammars = yield from self._decoding(settings, loaded, made)
        store = yield from self._store(settings, loaded, listener, made)
        memory = MemoryGuard(store, self.shared)
        made.callback(memory.close)
        runtime = TextRuntime(settings, loaded, store, memory, drafts, grammars, made, self.ranks)
        runtime.loaded = limit_context(loaded, memory.most_tokens(model, pinned), self._say)
        self.ranks.loaded()
        return runtime

    def _decoding(
        self, settings: Settings, loaded: LoadedModel, made: ExitStack
    ) -> Generator[float, None, tuple[Drafts | None, Grammars]]:
        """What its tokens are drafted and constrained by."""
        if not self.shared.guards:
            self._wired = wire_weights(settings.wired_limit, self._device)
        grammars = yield from in_background(lambda: self._vocabularies.of(loaded.folder, loaded.wrapper))
        if settings.drafts == "off":
            return None, grammars
        drafts = make_drafts(loaded.model, loaded.make_cache, self.ranks)
        made.callback(_close, drafts)
        return drafts, grammars

    def _store(
        self, settings: Settings, loaded: LoadedModel, listener: KVListener | None, made: ExitStack
    ) -> Generator[float, None, GuardedStore]:
        """Its KV in memory and on disk."""
        disk = yield from in_background(lambda: self._disk(settings, loaded), _close)
        made.callback(_close, disk)
        store = yield from make_store(settings, loaded, self.shared.most_stored, self.ranks, disk, listener)
        made.callback(store.close)
        where = f"{self._disk_bytes(settings) / GIB:.1f} GiB in {settings.disk_dir}"
        self.stored_where = where if disk and disk.ready else "nothing on disk"
        return store

    def _unwire(self) -> None:
        if self._wired:
            self._wired = False
            unwire()

    def _shaped(self, settings: Settings, loaded: LoadedModel) -> LoadedModel:
        """A model of mlx-vlm in the shape of one of mlx-lm; without its vision part, if that cannot be done."""
        if loaded.vision is None:
            alone = library_of(loaded.capabilities.config) == "mlx-vlm"
            return replace(loaded, model=LanguageAlone(loaded.model)) if alone else loaded
        try:
            return replace(loaded, model=VisionModel(loaded.model, loaded.vision.pad))
        except NotSupported as error:
            self._say(f"vision    off: {error.message} The model reads text only.")
            blind = settings.model_copy(update={"vision": "off"})
            inputs = LoadInputs(loaded.wrapper, loaded.folder, bases=self.bases)
            return self._shaped(blind, load_model(blind, self._device, self._progress, self._say, inputs))

    def _with_drafter(self, settings: Settings, loaded: LoadedModel) -> Generator[float, None, LoadedModel]:
        """With what drafts for it, if there is something that fits. Raises NotFound: DRAFT_MODEL is not there."""
        if settings.drafts == "off":
            return loaded
        config = loaded.capabilities.config
        find = partial(find_drafter, settings.draft_model, loaded.folder, config, self._progress)
        files = yield from in_background(find)
        if files is None:
            if settings.draft_model == "auto" and (published := published_head(name_of(loaded.folder))):
                self._say(f"drafts    a head that drafts for {loaded.name} is published: {command()} pull {published}")
            return loaded
        try:
            self._check_drafter(files)
            if files.kind == "model":
                yield from in_background(lambda: _check_vocabulary(loaded, files.folder))
            language, stamps = language_of(loaded.model), loaded.stamps | stamps_of(files.folder)
            model = yield from add_drafter(loaded.model, language, files, settings.trust_remote_code)
        except NotSupported as error:
            self._say(f"drafts    {files.detail} does not draft for {loaded.name}: {error.message}")
            return loaded
        self._say(f"drafts    {files.detail} drafts for {loaded.name}")
        key = f"{loaded.fingerprint}-drafter-{fingerprint(files.folder)}"
        size = loaded.weight_bytes + bytes_of(model.drafter)
        key = hashlib.sha256(key.encode()).hexdigest()
        return replace(loaded, model=model, fingerprint=key, stamps=stamps, weight_bytes=size)

    def _check_drafter(self, files: DrafterFiles) -> None:
        """Called before the drafter's weights are read. Raises NotSupported; its text ends the caller's sentence."""
        if files.kind == "model" and library_of(read_config(files.folder)) is None:
            raise NotSupported("neither mlx-lm nor mlx-vlm has a text model of its type; see docs/drafts.md")
        free = max(0, self.shared.usable - self.shared.weight_bytes - PREFILL_BYTES - LEAST_CACHE_BYTES)
        if self.shared.usable and files.nbytes > free:
            sizes = f"its weights take {files.nbytes / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free"
            raise NotSupported(f"{sizes} beside the model and the least that a prefill and KV need")

    def _disk(self, settings: Settings, loaded: LoadedModel) -> DiskTier | None:
        folder = settings.disk_dir
        if folder is None:
            return None
        weights = WeightsDigest(loaded.stamps, folder)
        whose: str | Identify = f"{loaded.fingerprint} {weights.value}"
        if not weights.value:
            whose = partial(_identified, loaded.fingerprint, weights)
            self._say("disk      KV goes there once all bytes of the weights have been read, this first time")
        return DiskTier(folder, whose, self._disk_bytes(settings))

    def _disk_bytes(self, settings: Settings) -> int:
        folder, limit = settings.disk_dir, settings.kv_disk_bytes
        return default_disk_bytes(folder) if limit is None and folder is not None else limit or 0


def _identified(fingerprint: str, weights: WeightsDigest, is_over: Callable[[], bool]) -> str:
    found = weights.compute(is_over)
    return f"{fingerprint} {found}" if found else ""


def _check_vocabulary(loaded: LoadedModel, folder: Path) -> None:
    """Raises NotSupported with the end of a sentence."""
    try:
        small = read_tokenizer(folder)._tokenizer.get_vocab()
    except LIBRARY_ERRORS as error:
        raise NotSupported(f"its tokenizer cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
    if why := other_vocabulary(loaded.tokenizer.get_vocab(), small):
        raise NotSupported(why)


def _close(opened: Any) -> None:
    """What is closed already may be closed again; ``None``: there is nothing."""
    if opened is not None:
        opened.close()
