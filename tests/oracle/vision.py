"""The oracle with eyes: an image's places hold what its pixels are, so that a wrong image is in the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from start_llm.core.prompt import ImageSpan
from tests.oracle.answers import FIRST_SEEN


def seen_as(pixels: np.ndarray[Any, Any], length: int) -> list[int]:
    """What stands in the KV of an image's places: made of nothing but its pixels, small enough for a float32."""
    words = np.frombuffer(hashlib.shake_128(pixels.tobytes()).digest(4 * length), dtype=np.uint32)
    return (words % (1 << 22) + FIRST_SEEN).tolist()


class VisionOracle:
    """A loaded oracle in the shape of `engine.vision.VisionModel`. It never looks at the ids of an image's places.

    Attributes:
        encoded: images that it was given to see.
    """

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self.encoded = 0

    @property
    def layers(self) -> Any:
        return self.oracle.layers

    def make_cache(self) -> list[Any]:
        return list(self.oracle.make_cache())

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.oracle(inputs, cache=cache)

    def see(self, tokens: Sequence[int], cache: list[Any], images: Sequence[ImageSpan]) -> mx.array:
        seen = list(tokens)
        for image in images:
            seen[image.start : image.end] = seen_as(image.prepare()["pixels"], image.length)
            self.encoded += 1
        return self.oracle(mx.array([seen]), cache=cache)
