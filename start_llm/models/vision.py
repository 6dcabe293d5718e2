"""Loads a checkpoint with its vision part, by mlx-vlm; its processor turns an image into places in a prompt.

A checkpoint is loaded on the model thread. `VisionProcessor` is for any thread and computes nothing with MLX: mlx-vlm's
processors hand out what NumPy has computed as MLX arrays. Sizes are read off them and they are dropped on the thread
that asked; pixels are asked for on the model thread only (`ImageSpan.prepare`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model
from PIL import Image

from start_llm.core.errors import NotSupported
from start_llm.files.lru import Lru
from start_llm.models.checkpoint import LIBRARY_ERRORS, architectures, library_of, read_config

_PROBE = "start_llm was here"
_SIZES_KEPT = 4096
_TEXT_SIDE = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})

Places = tuple[tuple[int, ...], int, tuple[int, ...]]
Render = Callable[[list[dict[str, Any]]], str]


class VisionProcessor:
    """Implements `prompt.tokenise.Eyes` on a processor of mlx-vlm (or transformers).

    Args:
        text: what the chat template writes for an image, e.g. ``<|vision_start|><|image_pad|><|vision_end|>``.
        pad: the token that the processor repeats for an image; an attribute, too.
        name: names the processor and its settings.
    """

    def __init__(self, processor: Any, *, text: str, pad: int, name: str) -> None:
        self._processor = processor
        self._text = text
        self.pad = pad
        self._name = name
        self._sizes: Lru[tuple[int, int], Places] = Lru(_SIZES_KEPT)
        self._lock = threading.Lock()

    def places(self, width: int, height: int) -> Places:
        """Asks the processor once for every size, with a blank picture."""
        with self._lock:
            known = self._sizes.get((width, height))
            if known is None:
                image = Image.new("RGB", (width, height))
                known = self._split(self._processor(text=[self._text], images=[image]))
                self._sizes.put((width, height), known)
        return known

    def problem(self, width: int, height: int) -> str:
        """Why an image of this size cannot be shown, ``""`` if it can."""
        try:
            self.places(width, height)
        except Exception as error:  # noqa: BLE001 - processors raise what they like, and the client is told
            return f"this model cannot be shown an image of {width}x{height} pixels ({error})"
        return ""

    def key(self, identity: str) -> str:
        return f"{self._name} {identity}"

    def prepare(self, picture: Any) -> dict[str, Any]:
        made = self._processor(text=[self._text], images=[picture])
        arrays = {name: value for name, value in made.items() if name not in _TEXT_SIDE}
        return {**arrays, "length": self._split(made)[1]}

    def _split(self, made: Any) -> Places:
        (ids,) = made["input_ids"].tolist()
        if ids and ids[0] == getattr(getattr(self._processor, "tokenizer", None), "bos_token_id", None):
            ids = ids[1:]  # the beginning of a text, not of an image
        count = ids.count(self.pad)
        if not count:
            raise NotSupported("The model's processor gives no places for an image.")
        start = ids.index(self.pad)
        if ids[start : start + count] != [self.pad] * count:
            raise NotSupported("The model's processor divides an image in several parts; such models are not served.")
        return tuple(ids[:start]), count, tuple(ids[start + count :])


def image_text(render: Render) -> str:
    """What the chat template, `render`, writes for an image. Raises NotSupported if it writes nothing."""
    words = {"type": "text", "text": _PROBE}
    before, sign, _ = render([{"role": "user", "content": [words]}]).partition(_PROBE)
    seen, shown, _ = render([{"role": "user", "content": [{"type": "image"}, words]}]).partition(_PROBE)
    text = seen.removeprefix(before)
    if not sign or not shown or not seen.startswith(before) or not text.strip():
        raise NotSupported("The model's chat template does not show images.")
    return text


def processor_name(folder: Path) -> str:
    """Changes with the processor's settings and with the library that computes them."""
    digest = hashlib.sha256(version("mlx-vlm").encode())
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        digest.update(json.dumps([name, file.read_text("utf-8") if file.is_file() else ""]).encode())
    return digest.hexdigest()[:16]


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm knows the model as one with a vision part, by its ``config.json`` alone."""
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict) or config.get("model_file"):
        return False
    return str(kind) in architectures("mlx_vlm")


def read_with_vision(folder: Path, *, lazy: bool = False) -> tuple[Any, Any]:
    """mlx-vlm's model and processor. It is imported here: that takes a second, and most models do not need it."""
    model, processor = import_module("mlx_vlm.utils").load(str(folder), lazy=lazy)
    return model, processor


def mend_mlx_vlm() -> None:
    """Hy V4's sparse attention of mlx-vlm 0.7.10 keeps one compiled function for all lengths, in which the place of the
    partition stays that of the first length (mx.compile, shapeless). Here it is made anew at each call.

    DeepSeek V4's compressor pools each group of four tokens with the one before it, but takes the first group of a pass
    to have none before it. Here the cache keeps its last group (`kinds` counts it as state); a batch's does not.
    """
    indexer: Any = import_module("mlx_vlm.models.hy_v4.indexer")
    indexer._partition_scores = getattr(indexer._partition_scores, "__wrapped__", indexer._partition_scores)
    language: Any = import_module("mlx_vlm.models.deepseek_v4.language")
    if hasattr(language._overlap_compress_kv, "__wrapped__"):
        return
    pool, compress, caches = language._overlap_compress_kv, language.Compressor.__call__, list[Any]()

    @wraps(compress)
    def compressing(self: Any, x: Any, cache: Any, offset: Any) -> Any:
        caches.append(cache)
        try:
            return compress(self, x, cache, offset)
        finally:
            caches.pop()

    @wraps(pool)
    def pooling(kv: Any, gate: Any, ape: Any, size: int) -> Any:
        cache = caches[-1]
        if type(cache).__name__ == "BatchPoolingCache":  # found out when the model is checked
            raise ValueError("in a batch, rows close their groups in different passes")
        before = getattr(cache, "last_group", None)
        if before is None:
            pooled = pool(kv, gate, ape, size)
        else:
            joined = [mx.concatenate(list(both), axis=1) for both in zip(before, (kv, gate), strict=True)]
            pooled = pool(*joined, ape, size)[:, 1:]
        if cache is None:
            return pooled
        # Copies that are made in this pass: a view, or what is still to be computed, would hold all groups of the pass.
        cache.last_group = mx.contiguous(kv[:, -1:]), mx.contiguous(gate[:, -1:])
        return mx.depends(pooled, cache.last_group)

    language._overlap_compress_kv, language.Compressor.__call__ = pooling, compressing


def read_text_model(folder: Path, *, trust_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """A text model without its weights, and its configuration; see `checkpoint.library_of`. Raises LIBRARY_ERRORS."""
    config = read_config(folder)
    if library_of(config) == "mlx-vlm":
        mend_mlx_vlm()
        return import_module("mlx_vlm.utils").load_model(folder, lazy=True).language_model, config
    model, config = load_model(folder, lazy=True, trust_remote_code=trust_code)
    return model, config


def load_vision(folder: Path, config: Mapping[str, Any], wrapper: Any) -> tuple[Any, VisionProcessor]:
    """mlx-vlm's model, to which `engine.vision` gives the shape of a text model, and what reads its images.

    `wrapper`: mlx-lm's tokenizer.

    Raises NotSupported: it cannot be loaded with its vision part. It may still be loaded as a text model.
    """
    try:
        model, processor = read_with_vision(folder)
    except LIBRARY_ERRORS as error:
        raise NotSupported(f"mlx-vlm cannot load it: {type(error).__name__}: {str(error)[:300]}") from error
    pad = next((config[name] for name in ("image_token_id", "image_token_index") if config.get(name) is not None), None)
    if not isinstance(pad, int):
        raise NotSupported("its config names no image token")
    inner = wrapper._tokenizer

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
        except Exception as error:  # a template can fail in every way that code can
            raise NotSupported(f"its chat template does not show images: {error}") from error

    # Plain ChatML shows what stands in a message: there an image is its token.
    text = image_text(render) if wrapper.has_chat_template else str(inner.convert_ids_to_tokens(pad))
    vision = VisionProcessor(processor, text=text, pad=pad, name=processor_name(folder))
    vision.places(64, 64)  # what the processor cannot do shows now, and not at the first image
    return model, vision
