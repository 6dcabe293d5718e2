"""The models of `test_belongs`: those of `tests.prompt.models`, which do the same work once only.

Every server that is started looks at its template and tokenizer with the same questions, and many requests are alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.traits import VARIABLE
from tests.prompt.belongs_reading import START
from tests.prompt.models import model

_KEPT = 20_000


class _Template:
    reserved = HFTemplate.reserved

    def __init__(self, template: HFTemplate) -> None:
        self._template = template
        self.source = template.source

        @lru_cache(maxsize=_KEPT)
        def rendered(key: str) -> str:
            messages, tools, prompt, more = json.loads(key)
            return template.render(messages, tools, prompt, **more)

        self._rendered = rendered

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        if VARIABLE in kwargs:  # a function
            return self._template.render(messages, tools, add_generation_prompt, **kwargs)
        return self._rendered(json.dumps([messages, tools, add_generation_prompt, kwargs]))


class _Tokenizer:
    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.special_tokens, self.eos_ids = tokenizer.special_tokens, tokenizer.eos_ids
        self.longest_token = tokenizer.longest_token
        self.control_tokens, self.normal = tokenizer.control_tokens, tokenizer.normal
        self.encode_raw = tokenizer.encode_raw
        self._encoded = lru_cache(maxsize=_KEPT)(lambda text: tuple(tokenizer.encode(text)))
        self._decoded = lru_cache(maxsize=_KEPT)(tokenizer.decode)
        self._start = tokenizer.special_tokens["<|im_start|>"]

    def encode(self, text: str) -> list[int]:
        """A special token parts a text: the tokens of the parts are those of the whole."""
        return [token for part in START.split(text) for token in self._encoded(part)]

    def decode(self, tokens: Sequence[int]) -> str:
        starts = [0, *(at for at, token in enumerate(tokens) if token == self._start and at), len(tokens)]
        return "".join(self._decoded(tuple(tokens[at:end])) for at, end in pairwise(starts))


@lru_cache
def remembering(family: str) -> tuple[HFTemplate, HFTokenizer]:
    template, tokenizer = model(family)
    return _Template(template), _Tokenizer(tokenizer)
