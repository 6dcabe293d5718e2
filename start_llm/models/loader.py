"""From a path or repository to a model in memory: `find_model` reads its files (any thread), `load_steps` its weights
(model thread)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from start_llm.core.errors import NotSupported, Unavailable
from start_llm.core.extras import is_installed, missing
from start_llm.core.limits import QUANTISED_FROM
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.host.home import command
from start_llm.models.adapter import WEIGHTS, Adapter, check_fits, other_base, read_adapter, stamp_of, unusable
from start_llm.models.background import Progress, Say, telling
from start_llm.models.capabilities import Capabilities, read_capabilities, sampling_report
from start_llm.models.catalog import EMBEDDED_NAME, name_of, whole_snapshot
from start_llm.models.checkpoint import LIBRARY_ERRORS, library_of, maps_ngrams, read_config, weights_on_disk
from start_llm.models.device import Accelerator, Device, check_fit, check_vision_fit
from start_llm.models.drafters import DrafterFiles, find_drafter, other_vocabulary
from start_llm.models.embedded import ensure_embedded_model
from start_llm.models.fingerprint import Stamps, WeightsDigest, fingerprint, stamps_of
from start_llm.models.inspection import inspect_once
from start_llm.models.overrides import FOLDER
from start_llm.models.pull import find_folder
from start_llm.models.recommended import published_head
from start_llm.models.room import Weights, group_of
from start_llm.models.stepwise import bytes_of, read_weights, refusing
from start_llm.models.tokenizer import read_tokenizer, writing_hints
from start_llm.models.vision import VisionProcessor, has_vision, load_vision, read_text_model
from start_llm.parsing.registry import OutputStyle, output_style

READ_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """A checkpoint's arrays as a text model has them, without an adapter. Whoever computes with them holds this."""

    group: str  # what those who share them are counted under
    files: str  # `fingerprint.fingerprint` of it when it was read
    stamps: Stamps  # of its files then
    arrays: dict[str, Any]  # by the parameter's name; they belong to the model thread
    nbytes: int


BasesInMemory = WeakValueDictionary[str, BaseWeights]
"""By `group_of` their folder. What no model holds is not here. Filled by the model thread; any thread may look."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model is and what its files say. Holds no arrays; any thread may read it."""

    name: str  # what clients see
    source: str  # the folder or repository that it came from
    folder: Path  # where that lies on this disk
    wrapper: Any  # mlx-lm's tokenizer, with its detokenizer
    capabilities: Capabilities
    eos: frozenset[int]  # tokens that end a turn
    context: int  # most tokens of a request, answer included
    fingerprint: str  # identifies the KV that this model makes, by samples of the weights
    files: str  # identifies the checkpoint itself
    adapter: Adapter | None  # is put on it

    @property
    def tokenizer(self) -> Any:
        """transformers'."""
        return self.wrapper._tokenizer

    @property
    def style(self) -> OutputStyle:
        """How it writes reasoning and calls of tools, as far as that is known."""
        known, hints = self.capabilities, self.capabilities.hints
        return output_style(
            tool_parser=known.tool_parser,
            reasoning_parser=known.reasoning_parser,
            reasoning_tags=hints.think_tags if hints is not None else None,
        )


@dataclass(frozen=True)
class Found(ModelFacts):
    """A model before its weights are read, and what only its loading needs to know."""

    stamps: Stamps  # of all files of weights that are in it, but an adapter's, before these were read
    drafter: DrafterFiles | None  # may draft for it
    sees: bool  # its vision part is to be loaded
    trust_code: bool  # Python code that it brings may run
    digest: WeightsDigest | None  # tells its KV on disk from all others'; ``None``: none is kept there


@dataclass(frozen=True)
class LoadedModel(ModelFacts):
    """A model and what goes with it. Arrays belong to the model thread; the rest may be read by all."""

    model: Any  # mlx-lm's, or mlx-vlm's (the whole one if it sees)
    weight_bytes: int  # of the parameters in memory
    vision: VisionProcessor | None = None  # how it reads images; ``None``: a text model
    base: BaseWeights | None = None  # weights that other adapters of the same model may share

    @property
    def weights(self) -> Weights:
        """What it takes of the memory that all models share."""
        if self.base is None:
            return Weights(self.weight_bytes)
        return Weights(self.weight_bytes - self.base.nbytes, self.base.group, self.base.nbytes)

    def make_cache(self) -> list[Any]:
        return list(make_prompt_cache(self.model))


def accelerator() -> Accelerator:
    """Where MLX computes, and how much memory it may use there. May be called on any thread."""
    if mx.default_device() == mx.Device(mx.cpu):
        return Accelerator("cpu")
    info = mx.device_info()
    limit = info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
    return Accelerator(
        "metal" if mx.metal.is_available() else "cuda",
        str(info.get("device_name", "")),
        int(limit) if limit else None,
    )


def peak_bytes(*, reset: bool) -> int:
    """The most memory that MLX had in use since the last reset; with `reset` it begins anew, at what is in use now."""
    if reset:
        mx.reset_peak_memory()
        return int(mx.get_active_memory())
    return int(mx.get_peak_memory())


def find_model(
    settings: Settings,
    device: Device,
    progress: Progress,
    say: Say,
    *,
    folder: Path | None = None,
    adapter: Adapter | None = None,
    read: Callable[[Path], Any] = read_tokenizer,
    parts: int = 1,
) -> Found:
    """Reads all of a model but its weights. Any thread; only the embedded model is made here, which computes.

    Args:
        folder: where `MODEL_PATH` lies on this disk; ``None``: that, or the embedded model if it is unset, is looked
            for, and fetched if need be.
        adapter: is put on it, in place of ADAPTER_PATH.
        read: as `read_tokenizer`.
        parts: so many processes have an equal part of the weights.

    Raises:
        NotFound: no such folder, repository or drafter.
        BadRequest: there is something wrong with the adapter.
        OutOfMemory: the weights do not fit. Nothing of them is downloaded then.
        NotSupported: mlx-lm does not know it, or its code is not trusted.
    """
    source = settings.model_path or EMBEDDED_NAME
    adapter = adapter or _adapter(settings, source, say)
    folder, capabilities = _files(settings, device, progress, say, folder, parts)
    inspected = None if settings.model_path is None else inspect_once(settings, source, folder)
    stamps, where = stamps_of(folder), settings.disk_dir
    with refusing(library_of(capabilities.config) or "mlx-lm", source):
        wrapper, files = read(folder), fingerprint(folder)
        capabilities = capabilities.with_vocabulary(wrapper._tokenizer.get_vocab(), writing_hints(wrapper))
    quantised = f"kv {settings.kv_bits} {settings.kv_group_size} {QUANTISED_FROM}"
    found = Found(
        name=settings.served_model_name or capabilities.name,
        source=source,
        folder=folder,
        wrapper=wrapper,
        capabilities=capabilities if inspected is None else capabilities.with_probe(inspected),
        eos=frozenset(wrapper.eos_token_ids),
        context=settings.context_within(capabilities.context),
        fingerprint=fingerprint(folder, extra=quantised) if settings.kv_bits else files,
        files=files,
        stamps=stamps,
        adapter=adapter,
        drafter=None,
        sees=adapter is None and _sees(settings, capabilities.config, say),
        trust_code=settings.trust_remote_code,
        digest=None,
    )
    if settings.drafts != "off" and (drafter := _drafter(settings, found, progress, say)) is not None:
        found, stamps = replace(found, drafter=drafter), stamps | stamps_of(drafter.folder)
    return found if where is None else replace(found, digest=WeightsDigest(stamps, where))


def _files(
    settings: Settings, device: Device, progress: Progress, say: Say, folder: Path | None, parts: int
) -> tuple[Path, Capabilities]:
    """The folder that `MODEL_PATH` means, fetched if need be, and what its files say. Raises as `find_model`."""
    if settings.model_path is None:
        source, quantised = EMBEDDED_NAME, accelerator().backend != "cpu"
        folder = folder or ensure_embedded_model(settings.cache_dir, quantised=quantised, progress=progress)
    else:
        source = settings.model_path
    check = partial(_check_room, settings, source.rstrip("/").rsplit("/", 1)[-1], device, parts)
    try:
        folder = folder or find_folder(source, "MODEL_PATH", progress, whole_snapshot, check)
        if settings.model_path is not None and (warning := check(folder)) is not None:
            say(f"memory    {warning}")
        capabilities, makers = read_capabilities(settings, FOLDER, source, folder)
    except (OSError, ValueError) as error:
        raise NotSupported(f"{source} cannot be loaded: {error}") from error
    for line in sampling_report(capabilities.sampling, makers):
        say(f"sampling  {line}")
    return folder, capabilities


def load_steps(
    found: Found,
    progress: Progress,
    say: Say,
    bases: BasesInMemory,
    shard: Callable[[Any, str, Mapping[str, Any]], None] = lambda model, name, config: None,
) -> Generator[float, None, LoadedModel]:
    """Reads the weights, some at a step. A model that sees is loaded by mlx-vlm, in one step. Model thread only.

    `bases`: weights that other models have in memory. `shard` leaves this process's part of a model that is not read
    yet: of (model, its name, its configuration).

    Raises:
        BadRequest: the adapter cannot be put on it.
        NotSupported: it cannot be loaded; one that `sees` may be without its vision part.
        Unavailable: its files were changed meanwhile.
    """
    name = found.capabilities.name
    with telling(progress, f"loading {name}") as told:
        if found.sees:
            (model, vision), base = load_vision(found.folder, found.capabilities.config, found.wrapper), None
        else:
            (model, base), vision = (yield from _text_model(found, bases, shard, told)), None
        if (adapter := found.adapter) is not None:
            yield 0.0
            _put_on(model, adapter, name)
            say(f"adapter   {adapter.name}  ({adapter.kind}, rank {adapter.parameters['rank']})")
        if stamps_of(found.folder) != found.stamps:  # the fingerprint was made before the weights were read
            raise Unavailable(f"{name}: its files were changed while they were read; ask again.")
    facts = {each.name: getattr(found, each.name) for each in fields(ModelFacts)}
    return _of_its_own(LoadedModel(**facts, model=model, weight_bytes=bytes_of(model), vision=vision, base=base))


def _text_model(
    found: Found,
    bases: BasesInMemory,
    shard: Callable[[Any, str, Mapping[str, Any]], None],
    told: Callable[[float], None],
) -> Generator[float, None, tuple[Any, BaseWeights]]:
    """The model (mlx-vlm's language model alone, where mlx-lm has not its type) and the weights. Raises NotSupported.

    Weights that another model has in memory are not read again: this one is built anew around the same arrays.
    """
    with refusing(library_of(found.capabilities.config) or "mlx-lm", found.source):
        model, config = read_text_model(found.folder, trust_code=found.trust_code)
        shard(model, found.source, config)
        group = group_of(found.folder)
        base = bases.get(group)
        if base is not None and (base.files, base.stamps) == (found.files, found.stamps):
            model.load_weights(list(base.arrays.items()))
        else:
            yield from read_weights(model, told)
            arrays = dict(tree_flatten(model.parameters()))
            # Else they are others than those that are there.
            counted = group if base is None else f"{group} {found.files} {hash(found.stamps):x}"
            base = BaseWeights(counted, found.files, found.stamps, arrays, bytes_of(model))
            bases[group] = base
        yield 0.0
        return model, base


def _of_its_own(loaded: LoadedModel) -> LoadedModel:
    """With a vision part or by mlx-vlm its KV is another one; with an adapter, so is what it was found to do."""
    if loaded.adapter is not None:
        by = f"adapter-{loaded.adapter.digest}"
    elif loaded.vision is not None:
        by = f"eyes-{loaded.vision.key('')}"
    elif library_of(loaded.capabilities.config) == "mlx-vlm":
        by = f"mlx-vlm {version('mlx-vlm')}"
    else:
        return loaded
    kv, files = (hashlib.sha256(f"{each}-{by}".encode()).hexdigest() for each in (loaded.fingerprint, loaded.files))
    return replace(loaded, fingerprint=kv, files=files if loaded.adapter is not None else loaded.files)


def _drafter(settings: Settings, found: Found, progress: Progress, say: Say) -> DrafterFiles | None:
    """What may draft for the model, if its tokens are the same. Raises NotFound: DRAFT_MODEL is not there."""
    files = find_drafter(settings.draft_model, found.folder, found.capabilities.config, progress)
    if files is None:
        if settings.draft_model == "auto" and (published := published_head(name_of(found.folder))):
            say(f"drafts    a head that drafts for {found.name} is published: {command()} pull {published}")
        return None
    try:
        if files.kind == "model":
            check_small_model(files.folder, found.tokenizer)
    except NotSupported as error:
        say(f"drafts    {files.detail} does not draft for {found.name}: {error.message}")
        return None
    return files


def check_small_model(folder: Path, tokenizer: Any) -> None:
    """Whether it can draft for a model with this tokenizer. Raises NotSupported; its text ends a sentence."""
    if library_of(read_config(folder)) is None:
        raise NotSupported("neither mlx-lm nor mlx-vlm has a text model of its type; see docs/drafts.md")
    try:
        small = read_tokenizer(folder)._tokenizer.get_vocab()
    except LIBRARY_ERRORS as error:
        raise NotSupported(f"its tokenizer cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
    if why := other_vocabulary(tokenizer.get_vocab(), small):
        raise NotSupported(why)


def _adapter(settings: Settings, source: str, say: Say) -> Adapter | None:
    """ADAPTER_PATH's, looked at before the model is read. Raises NotFound, BadRequest."""
    if settings.adapter_path is None:
        return None
    adapter = read_adapter(expanded(settings.adapter_path), f"ADAPTER_PATH={settings.adapter_path}")
    if (trained := other_base(adapter.base, source)) is not None:
        differ = "answers are off if these differ"
        say(f"adapter   {adapter.name} was trained on {trained}, and {source} is served; {differ}")
    return adapter


def _put_on(model: Any, adapter: Adapter, source: str) -> None:
    """Changes `model`, which errors call `source`; the base's weights stay as they are. Raises BadRequest."""
    try:
        linear_to_lora_layers(model, adapter.layers, dict(adapter.parameters), use_dora=adapter.kind == "dora")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise unusable(f"The adapter {adapter.name} cannot be put on {source}: {error}") from error
    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    check_fits(adapter, {name: shape for name, shape in shapes.items() if adapter.brings(name)}, source)
    try:
        trained: Any = mx.load(str(adapter.folder / WEIGHTS))
        model.load_weights(list(trained.items()), strict=False)
        model.eval()  # else its dropout would be at work
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise unusable(f"The weights of the adapter {adapter.name} cannot be read: {error}") from error
    if stamp_of(adapter.folder) != adapter.stamp:  # its KV would be kept as another one's
        raise unusable(f"The adapter {adapter.name} was changed while it was read; ask again.")


def read_ahead(folder: Path, most: int, progress: Progress, name: str) -> None:
    """Reads the weights' files once, so that the system has them in its memory. Any thread.

    Not those of more than `most` bytes: what comes first would be gone before it is needed. Nor those with a table that
    stays on the disk.
    """
    files = sorted(folder.glob("model*.safetensors"))
    mapped = (folder / "config.json").is_file() and maps_ngrams(read_config(folder))
    size, done = sum(path.stat().st_size for path in files), 0
    if mapped or size > most:
        return
    with telling(progress, f"reading {name}, {as_size(size)}") as told:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while piece := len(file.read(READ_BYTES)):
                    done += piece
                    told(done / size)


def _check_room(settings: Settings, name: str, device: Device, parts: int, folder: Path) -> str | None:
    """A warning if the weights leave little memory. `folder` has the JSON files at least. Raises OutOfMemory."""
    if settings.vision != "off" and settings.kv_bits is None and has_vision(read_config(folder)):
        check_vision_fit(name, weights_on_disk(folder), device)
    return check_fit(name, weights_on_disk(folder) // parts, device)


def _sees(settings: Settings, config: Mapping[str, Any], say: Say) -> bool:
    """Whether the model has a vision part that is to be loaded."""
    if settings.vision != "off" and isinstance(config.get("vision_config"), dict) and not is_installed("mlx_vlm"):
        say(f"vision    off: {missing('mlx_vlm')}; the model reads text only")
    if settings.vision == "off" or not has_vision(config):
        return False
    if settings.kv_bits is not None:
        say("vision    off: images cannot be served with KV_BITS; the model reads text only")
    return settings.kv_bits is None
