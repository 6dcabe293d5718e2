"""How a vision model's processor turns an image into places in a prompt. Any thread; nothing is computed with MLX.

mlx-vlm's processors hand out what NumPy has computed as MLX arrays. Sizes are read off them and they are let go on the
thread that asked; pixels are asked for on the model thread only (`ImageSpan.prepare`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from start_llm.core.errors import NotSupported

_PROBE = "start_llm was here"
_SIZES_KEPT = 4096
_TEXT_SIDE = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})

Places = tuple[tuple[int, ...], int, tuple[int, ...]]
Render = Callable[[list[dict[str, Any]]], str]


class ProcessorEyes:
    """Implements `prompt.ports.Eyes` on a processor of mlx-vlm (or transformers).

    Args:
        text: what the chat template writes for an image, e.g. ``<|vision_start|><|image_pad|><|vision_end|>``.
        pad: the token that the processor repeats for an image.
        name: names the processor and its settings.
    """

    def __init__(self, processor: Any, *, text: str, pad: int, name: str) -> None:
        self._processor, self._text, self._pad, self._name = processor, text, pad, name
        self._sizes: OrderedDict[tuple[int, int], Places] = OrderedDict()
        self._lock = threading.Lock()

    def places(self, width: int, height: int) -> Places:
        """Asks the processor once for every size, with a blank picture."""
        with self._lock:
            known = self._sizes.get((width, height))
            if known is None:
                known = self._sizes[width, height] = self._look(width, height)
                if len(self._sizes) > _SIZES_KEPT:
                    self._sizes.popitem(last=False)
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

    def _look(self, width: int, height: int) -> Places:
        return self._split(self._processor(text=[self._text], images=[Image.new("RGB", (width, height))]))

    def _split(self, made: Any) -> Places:
        (ids,) = made["input_ids"].tolist()
        if ids and ids[0] == getattr(getattr(self._processor, "tokenizer", None), "bos_token_id", None):
            ids = ids[1:]  # the beginning of a text, not of an image
        count = ids.count(self._pad)
        if not count:
            raise NotSupported("The model's processor gives no places for an image.")
        start = ids.index(self._pad)
        if ids[start : start + count] != [self._pad] * count:
            raise NotSupported("The model's processor divides an image in several parts; such models are not served.")
        return tuple(ids[:start]), count, tuple(ids[start + count :])


def image_text(render: Render) -> str:
    """What the chat template writes for an image. Raises NotSupported if it writes nothing.

    Args:
        render: the template, given messages, without the generation prompt.
    """
    words = {"type": "text", "text": _PROBE}
    plain = render([{"role": "user", "content": [words]}])
    seen = render([{"role": "user", "content": [{"type": "image"}, words]}])
    before = plain[: plain.find(_PROBE)]
    if _PROBE not in plain or not seen.startswith(before) or _PROBE not in seen:
        raise NotSupported("The model's chat template does not show images.")
    text = seen[len(before) : seen.index(_PROBE)]
    if not text.strip():
        raise NotSupported("The model's chat template does not show images.")
    return text


def processor_name(folder: Path) -> str:
    """Changes with the processor's settings and with the library that computes them."""
    digest = hashlib.sha256(version("mlx-vlm").encode())
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        digest.update(json.dumps([name, file.read_text("utf-8") if file.is_file() else ""]).encode())
    return digest.hexdigest()[:16]
