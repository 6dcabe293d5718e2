"""A prompt ready for the model: what `prompt` makes, `engine` runs and `kvcache` stores; what stands for an image.

The language model reads the same pad token at every place of an image. Here each place has an id of its own, made of
the image's identity and beyond any vocabulary: two prompts have equal tokens there only if they show the same image,
in memory, on disk and in the conversation tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """Model tokens with the places where the store may want a restore point."""

    tokens: tuple[int, ...]  # model tokens, the generation prompt included
    boundaries: tuple[int, ...] = ()  # ascending token offsets at which a message begins (0 excluded)
    system_end: int = 0  # end of the tools+system block, a token offset, 0 if there is none
    transient: int | None = None  # offset at which a trailing transient message begins, or ``None``
    generation: int = 0  # offset at which the generation prompt begins (``len(tokens)`` if there is none)
    images: tuple[ImageSpan, ...] = ()  # the images in it, ascending; `tokens` hold ids of their own in their places

    def image_at(self, offset: int) -> ImageSpan | None:
        """The image that `offset` would cut in two."""
        return next((image for image in self.images if image.start < offset < image.end), None)


FIRST_IMAGE_ID = 1 << 30
"""Token ids from here on are places of images; none of them may reach the model's embedding."""


@lru_cache(maxsize=256)
def image_ids(key: str, length: int) -> tuple[int, ...]:
    """The ids of an image's places: 30 bits each of a digest of `key`, which names pixels and processor."""
    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * length), dtype=np.uint32)
    return tuple((words >> 2 | FIRST_IMAGE_ID).tolist())


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a prompt."""

    # `start`, `length`: its places, in tokens
    start: int
    length: int
    key: str  # names its pixels and the processor
    # what the model's processor makes of it (arrays by name). Decodes the image, so it is called only if the image
    # has to be computed; any thread. Raises StartLLMError.
    prepare: Callable[[], dict[str, Any]] = field(compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.length
