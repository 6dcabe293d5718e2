"""The oracle in this process, with mlx-lm's own generation loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.generate import generate_step

from tests.oracle.answers import END, MISMATCH, START, truth

__all__ = ["MISMATCH", "Oracle", "expected_truth", "script"]

_OPENING_LENGTH = 3  # <|im_start|> assistant \n


def expected_truth(tokens: Sequence[int]) -> str:
    """What ``[[truth]]`` must answer for a prompt of these tokens: up to and including the last generation prompt."""
    array = np.asarray(tokens)
    return truth(array[: int(np.flatnonzero(array == START)[-1]) + _OPENING_LENGTH])


def script(*texts: str) -> str:
    """The cue for a user message: the k-th assistant turn after it is the k-th text."""
    return "[[script]]" + "[[next]]".join(texts) + "[[end]]"


@dataclass
class Oracle:
    """A loaded checkpoint. `model.work` counts what went through it. Use on one thread."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> Oracle:
        model, tokenizer = load(str(folder), trust_remote_code=True)[:2]
        return cls(model, tokenizer)

    def prompt(self, messages: str | list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Tokens of a conversation (or of one user message), the generation prompt included."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **kwargs))

    def generate(self, tokens: Sequence[int], cache: Any = None, limit: int = 4096, chunk: int = 512) -> list[int]:
        """Greedy answer without its end token; `cache` (made if ``None``) holds prompt, answer and end token after."""
        cache = self.model.make_cache() if cache is None else cache
        answer: list[int] = []
        steps = generate_step(
            mx.array(list(tokens)), self.model, prompt_cache=cache, max_tokens=limit, prefill_step_size=chunk
        )
        for token, _ in steps:
            if token == END:
                break
            answer.append(int(token))
        return answer

    def say(self, messages: str | list[dict[str, Any]], **kwargs: Any) -> str:
        """The answer's text to a conversation, from an empty cache."""
        return str(self.tokenizer.decode(self.generate(self.prompt(messages, **kwargs))))
