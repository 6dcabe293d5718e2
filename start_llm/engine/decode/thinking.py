"""A thinking budget: reasoning is closed once it has used up its tokens. Model thread; one per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from start_llm.core.work import ThinkingLimit
from start_llm.engine.decode.sampling import Remembering


class ThinkingBudget(Remembering):
    """A logits processor that forces the end-of-reasoning token when the budget is used up.

    It reads each new token, which costs the decode step its head start; only requests with a budget have it.
    """

    def __init__(self, limit: ThinkingLimit, generated: Sequence[int] = ()) -> None:
        self._limit = limit
        self._inside = limit.inside
        self._used = 0
        self._started = False
        for token in generated:
            self._see(token)

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if self._started:
            self._see(int((tokens if tokens.size == 1 else tokens[-1]).item()))
        self._started = True
        if not self._inside or self._used < self._limit.tokens:
            return logits
        allowed = np.zeros(logits.shape[-1], dtype=bool)
        allowed[self._limit.closes] = True
        return mx.where(mx.array(allowed)[None], logits, -float("inf"))

    def _see(self, token: int) -> None:
        if token == self._limit.closes:
            self._inside = False
        elif self._inside:
            self._used += 1
        elif token == self._limit.opens:
            self._inside = True
