"""From a path or repository to a model in memory. Runs on the model thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
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
from start_llm.models.adapter import WEIGHTS, Adapter, check_fits, other_base, read_adapter, stamp_of, unusable
from start_llm.models.background import Progress, Say, at_once, in_background
from start_llm.models.capabilities import Capabilities, ProbeResult, read_capabilities, sampling_report
from start_llm.models.catalog import EMBEDDED_NAME, whole_snapshot
from start_llm.models.checkpoint import library_of, maps_ngrams, read_config, weights_on_disk
from start_llm.models.device import Accelerator, Device, check_fit, check_vision_fit
from start_llm.models.embedded import ensure_embedded_model
from start_llm.models.fingerprint import Stamps, fingerprint, stamps_of
from start_llm.models.inspection import inspect_once
from start_llm.models.overrides import FOLDER
from start_llm.models.pull import find_folder
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
class LoadedModel:
    """A model and what goes with it. Arrays belong to the model thread; the rest may be read by all."""

    name: str  # what clients see
    source: str  # the folder or repository that it came from
    folder: Path  # where that lies on this disk
    model: Any  # mlx-lm's, or mlx-vlm's (the whole one if it sees)
    tokenizer: Any  # transformers'
    wrapper: Any  # mlx-lm's tokenizer, with its detokenizer
    capabilities: Capabilities
    eos: frozenset[int]  # tokens that end a turn
    weight_bytes: int  # of the parameters in memory
    context: int  # most tokens of a request, answer included
    fingerprint: str  # identifies the KV that this model makes, by samples of the weights
    files: str  # identifies the checkpoint itself
    stamps: Stamps = frozenset()  # of all files of weights that are in it, but an adapter's
    vision: VisionProcessor | None = None  # how it reads images; ``None``: a text model
    adapter: Adapter | None = None  # what was put on it
    base: BaseWeights | None = None  # weights that other adapters of the same model may share

    @property
    def weights(self) -> Weights:
        """What it takes of the memory that all models share."""
        if self.base is None:
            return Weights(self.weight_bytes)
        return Weights(self.weight_bytes - self.base.nbytes, self.base.group, self.base.nbytes)

    @property
    def style(self) -> OutputStyle:
        """How it writes reasoning and calls of tools, as far as that is known."""
        known, hints = self.capabilities, self.capabilities.hints
        return output_style(
            tool_parser=known.tool_parser,
            reasoning_parser=known.reasoning_parser,
            reasoning_tags=hints.think_tags if hints is not None else None,
        )

    def make_cache(self) -> list[Any]:
        return list(make_prompt_cache(self.model))


@dataclass(frozen=True)
class LoadInputs:
    """What there is already when a model is loaded."""

    tokenizer: Any = None  # mlx-lm's, if it has been read
    folder: Path | None = None  # where MODEL_PATH lies on this disk, if that is known: nothing is fetched then
    adapter: Adapter | None = None  # is put on it, in place of ADAPTER_PATH
    bases: BasesInMemory = field(default_factory=BasesInMemory)  # weights that other models have in memory
    parts: int = 1  # so many processes have an equal part of the weights
    # leaves this process's part of a model that is not read yet: of (model, its name, its configuration)
    shard: Callable[[Any, str, Mapping[str, Any]], None] = lambda model, name, config: None


@dataclass(frozen=True)
class _Checkpoint:
    """A model's files. `source`: the folder or repository that they came from; `inspected`: see `inspection`."""

    name: str
    source: str
    folder: Path
    capabilities: Capabilities
    inspected: ProbeResult | None = None


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


def load_model(
    settings: Settings, device: Device, progress: Progress, say: Say, given: LoadInputs | None = None
) -> LoadedModel:
    """Loads `MODEL_PATH`, or the embedded model if it is unset: `load_steps` without a pause."""
    return at_once(load_steps(settings, device, progress, say, given))


def load_steps(
    settings: Settings, device: Device, progress: Progress, say: Say, given: LoadInputs | None = None
) -> Generator[float, None, LoadedModel]:
    """Loads a model, some weights at a step. A model that sees is loaded by mlx-vlm, in one step.

    What needs no MLX is done in the background. Only the embedded model is made here, which computes.

    Raises:
        NotFound: no such folder or repository.
        BadRequest: there is something wrong with the adapter.
        OutOfMemory: the weights do not fit. Nothing of them is downloaded or read then.
        NotSupported: mlx-lm does not know it, its code is not trusted,
        Unavailable: its files were changed meanwhile.
    """
    given = given or LoadInputs()
    adapter = given.adapter or _adapter(settings, settings.model_path or EMBEDDED_NAME, say)
    if given.folder is None:
        found = _find(settings, device, progress, say, None, given.parts)
    else:
        found = yield from in_background(lambda: _find(settings, device, progress, say, given.folder, given.parts))
    progress(f"loading {found.name}", 0.0)
    stamps = stamps_of(found.folder)
    if settings.model_path is not None:
        inspected = yield from in_background(lambda: inspect_once(settings, found.source, found.folder))
        found = replace(found, inspected=inspected)
    seeing = _load_vision(settings, found, given, say) if adapter is None else None
    if seeing is not None:
        (model, wrapper, vision), base = seeing, None
    else:
        (model, wrapper, base), vision = (yield from _text_model(settings, found, given)), None
    if adapter is not None:
        yield 0.0
        _put_on(model, adapter, found.name)
        say(f"adapter   {adapter.name}  ({adapter.kind}, rank {adapter.parameters['rank']})")
    progress(f"loading {found.name}", 1.0)
    nbytes = bytes_of(model)
    loaded = yield from in_background(lambda: _describe(settings, found, model, wrapper, base, nbytes))
    if stamps_of(found.folder) != stamps:  # the fingerprint was made after the weights were read: it must be theirs
        raise Unavailable(f"{found.name}: its files were changed while they were read; ask again.")
    return replace(_of_its_own(loaded, vision, adapter), stamps=stamps)


def _find(
    settings: Settings, device: Device, progress: Progress, say: Say, folder: Path | None, parts: int
) -> _Checkpoint:
    """The files that `MODEL_PATH` means; they are fetched if need be, and may be read. Raises as `load_steps`."""
    source = settings.model_path
    if source is None:
        source = EMBEDDED_NAME
        quantised = accelerator().backend != "cpu"
        folder = folder or ensure_embedded_model(settings.cache_dir, quantised=quantised, progress=progress)
    try:
        if settings.model_path is not None:
            name = source.rstrip("/").rsplit("/", 1)[-1]
            folder = folder or find_folder(
                source,
                "MODEL_PATH",
                progress,
                whole_snapshot,
                lambda found: _check_room(settings, name, found, device, parts),
            )
            warning = _check_room(settings, name, folder, device, parts)
            if warning is not None:
                say(f"memory    {warning}")
        assert folder is not None
        capabilities, makers = read_capabilities(settings, FOLDER, source, folder)
    except (OSError, ValueError) as error:
        raise NotSupported(f"{source} cannot be loaded: {error}") from error
    for line in sampling_report(capabilities.sampling, makers):
        say(f"sampling  {line}")
    return _Checkpoint(capabilities.name, source, folder, capabilities)


def _text_model(
    settings: Settings, found: _Checkpoint, given: LoadInputs
) -> Generator[float, None, tuple[Any, Any, BaseWeights]]:
    """The model (mlx-vlm's language model alone, where mlx-lm has not its type), mlx-lm's tokenizer and the weights.

    Raises NotSupported.

    Weights that another model has in memory are not read again: this one is built anew around the same arrays.
    """
    with refusing(library_of(found.capabilities.config) or "mlx-lm", found.source):
        model, config = read_text_model(found.folder, trust_code=settings.trust_remote_code)
        given.shard(model, found.source, config)
        group, files = group_of(found.folder), (yield from in_background(lambda: fingerprint(found.folder)))
        base, stamps = given.bases.get(group), stamps_of(found.folder)
        if base is not None and (base.files, base.stamps) == (files, stamps):
            model.load_weights(list(base.arrays.items()))
        else:
            yield from read_weights(model)
            arrays = dict(tree_flatten(model.parameters()))
            # Else they are others than those that are there.
            counted = group if base is None else f"{group} {files} {hash(stamps):x}"
            base = BaseWeights(counted, files, stamps, arrays, bytes_of(model))
            given.bases[group] = base
        yield 0.0
        wrapper = given.tokenizer or (yield from in_background(lambda: read_tokenizer(found.folder)))
        return model, wrapper, base


def _of_its_own(loaded: LoadedModel, vision: VisionProcessor | None, adapter: Adapter | None) -> LoadedModel:
    """With a vision part or by mlx-vlm its KV is another one; with an adapter, so is what it was found to do."""

    if adapter is not None:
        by = f"adapter-{adapter.digest}"
    elif vision is not None:
        by = f"eyes-{vision.key('')}"
    elif library_of(loaded.capabilities.config) == "mlx-vlm":
        by = f"mlx-vlm {version('mlx-vlm')}"
    else:
        return loaded
    kv, files = (hashlib.sha256(f"{each}-{by}".encode()).hexdigest() for each in (loaded.fingerprint, loaded.files))
    files = files if adapter is not None else loaded.files
    return replace(loaded, vision=vision, adapter=adapter, fingerprint=kv, files=files)


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


def read_ahead(folder: Path, most: int, moved: Callable[[], None]) -> None:
    """Reads the weights' files once, so that the system has them in its memory. Any thread.

    Not those of more than `most` bytes: what comes first would be gone before it is needed. Nor those with a table that
    stays on the disk.
    """
    files = sorted(folder.glob("model*.safetensors"))
    mapped = (folder / "config.json").is_file() and maps_ngrams(read_config(folder))
    if mapped or sum(path.stat().st_size for path in files) > most:
        return
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                moved()


def _check_room(settings: Settings, name: str, folder: Path, device: Device, parts: int) -> str | None:
    """A warning if the weights leave little memory. `folder` has the JSON files at least. Raises OutOfMemory."""
    if settings.vision != "off" and settings.kv_bits is None and has_vision(read_config(folder)):
        check_vision_fit(name, weights_on_disk(folder), device)
    return check_fit(name, weights_on_disk(folder) // parts, device)


def _load_vision(
    settings: Settings, found: _Checkpoint, given: LoadInputs, say: Say
) -> tuple[Any, Any, VisionProcessor] | None:
    """As `load_vision`; ``None`` if the model has no vision part, or is to be served as a text model."""
    config = found.capabilities.config
    if settings.vision != "off" and isinstance(config.get("vision_config"), dict) and not is_installed("mlx_vlm"):
        say(f"vision    off: {missing('mlx_vlm')}; the model reads text only")
    if settings.vision == "off" or not has_vision(config):
        return None
    if settings.kv_bits is not None:
        say("vision    off: images cannot be served with KV_BITS; the model reads text only")
        return None
    try:
        return load_vision(found.folder, config, given.tokenizer)
    except NotSupported as error:
        say(f"vision    off: {error.message}; the model reads text only")
        return None


def _describe(
    settings: Settings, found: _Checkpoint, model: Any, wrapper: Any, base: BaseWeights | None, weight_bytes: int
) -> LoadedModel:
    """Reads the vocabulary and samples the files. Any thread: it only hands `model` on."""
    tokenizer, vocab = wrapper._tokenizer, wrapper._tokenizer.get_vocab()
    capabilities = found.capabilities.with_vocabulary(vocab, writing_hints(wrapper))
    files = fingerprint(found.folder) if base is None else base.files
    quantised = f"kv {settings.kv_bits} {settings.kv_group_size} {QUANTISED_FROM}"
    return LoadedModel(
        name=settings.served_model_name or found.name,
        source=found.source,
        folder=found.folder,
        model=model,
        tokenizer=tokenizer,
        wrapper=wrapper,
        capabilities=capabilities if found.inspected is None else capabilities.with_probe(found.inspected),
        eos=frozenset(wrapper.eos_token_ids),
        weight_bytes=weight_bytes,
        context=settings.context_within(capabilities.context),
        base=base,
        fingerprint=fingerprint(found.folder, extra=quantised) if settings.kv_bits else files,
        files=files,
    )
