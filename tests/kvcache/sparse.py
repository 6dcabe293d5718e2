"""Tiny random models that attend to less than the prompts of the tests: pools and indexes decide what is seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from start_llm.engine.vision import LanguageAlone
from tests.models import vlm_types

VOCAB = vlm_types.VOCAB
NAMES = ("deepseek_v4", "hy_v4", "qwen4_exp", "glm5_next")


@functools.cache
def model(name: str) -> LanguageAlone:
    """The same for every call."""
    return LanguageAlone(vlm_types.make(name).language_model)


def feed(made: Any, tokens: Sequence[int], cache: list[Any]) -> int:
    """Computes these tokens in one pass. Returns the token that the model predicts."""
    logits = made(mx.array([list(tokens)]), cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    return int(mx.argmax(logits[0, -1]).item())


def text(length: int, seed: int = 0) -> list[int]:
    return [(i * 37 + (i * i * (seed + 3)) // 7 + seed) % (VOCAB - 10) + 5 for i in range(length)]
