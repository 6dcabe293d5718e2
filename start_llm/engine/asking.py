"""What a model that serves nobody yet is asked: one greedy answer, and how it decodes. Model thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.settings import Settings
from start_llm.engine.decode.batch import eval_cache
from start_llm.engine.decoding_check import check_decoding
from start_llm.models.loader import LoadedModel
from start_llm.models.probe import Check
from start_llm.models.tool_probe import ASKED, SECONDS, TOKENS, Generate, TooSlow

_LEAST_CHUNK, _MOST_CHUNK = 16, 256
STEP_SECONDS = 0.05
"""About how long a chunk of the prompt takes: other models wait for it."""


def asker(settings: Settings, loaded: LoadedModel) -> Generate | None:
    """How `loaded` answers while it is looked at; ``None`` if it is not to be asked (MODEL_PROBE)."""
    if settings.model_probe == "off":
        return None
    return partial(greedy, loaded.model, eos=loaded.eos, most=TOKENS, seconds=SECONDS)


def checker(loaded: LoadedModel) -> Check:
    """Checks how `loaded` decodes."""
    tokens = loaded.tokenizer.encode(ASKED.content, add_special_tokens=False)
    return lambda: check_decoding(loaded.model, loaded.make_cache, tokens)


def greedy(
    model: Any,
    tokens: Sequence[int],
    *,
    eos: Collection[int],
    most: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int | None]:
    """The tokens that `model` answers to `tokens`, without the end token; ``None`` after each chunk of the prompt.

    Args:
        model: mlx-lm's, or of that shape.
        most: it ends after so many tokens.

    Raises:
        TooSlow: it takes longer than `seconds`, or the prompt would; the tokens up to then have been given.
    """
    began = clock()
    cache = make_prompt_cache(model)
    waiting = list(tokens)
    size = _LEAST_CHUNK
    while len(waiting) > 1:
        chunk = waiting[: min(size, len(waiting) - 1)]
        start = clock()
        model(mx.array(chunk)[None], cache=cache)
        eval_cache(cache)
        now = clock()
        del waiting[: len(chunk)]
        if (now - began) * len(tokens) > seconds * (len(tokens) - len(waiting)):
            raise TooSlow
        quick = int(len(chunk) * STEP_SECONDS / max(now - start, 1e-6))
        size = min(_MOST_CHUNK, 4 * size, max(_LEAST_CHUNK, quick))
        yield None
    for _ in range(most):
        logits = model(mx.array(waiting)[None], cache=cache)
        token = cast(int, mx.argmax(logits[0, -1]).item())
        if token in eos:
            return
        yield token
        if clock() - began > seconds:
            raise TooSlow
        waiting = [token]
