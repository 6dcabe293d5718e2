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
from tests.prompt.models import EOS, TEMPLATES, fast_tokenizer

_KEPT = 20_000


class _Template(HFTemplate):
    def render(self, *messages_and_more: Any, **kwargs: Any) -> str:
        if VARIABLE in kwargs:  # a function
            return super().render(*messages_and_more, **kwargs)
        return self._rendered(json.dumps([messages_and_more, kwargs]))

    @lru_cache(maxsize=_KEPT)  # noqa: B019 - there is one for each family
    def _rendered(self, key: str) -> str:
        messages_and_more, kwargs = json.loads(key)
        return super().render(*messages_and_more, **kwargs)


class _Tokenizer(HFTokenizer):
    def encode(self, text: str) -> list[int]:
        """A special token parts a text: the tokens of the parts are those of the whole."""
        return [token for part in START.split(text) for token in self._encoded(part)]

    def decode(self, tokens: Sequence[int]) -> str:
        start = self.special_tokens["<|im_start|>"]
        starts = [0, *(at for at, token in enumerate(tokens) if token == start and at), len(tokens)]
        return "".join(self._decoded(tuple(tokens[at:end])) for at, end in pairwise(starts))

    @lru_cache(maxsize=_KEPT)  # noqa: B019
    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(super().encode(text))

    @lru_cache(maxsize=_KEPT)  # noqa: B019
    def _decoded(self, tokens: tuple[int, ...]) -> str:
        return super().decode(tokens)


@lru_cache
def remembering(family: str) -> tuple[HFTemplate, HFTokenizer]:
    tokenizer = fast_tokenizer()
    eos = [tokenizer.convert_tokens_to_ids(name) for name in EOS[family]]
    return _Template(tokenizer, TEMPLATES[family]), _Tokenizer(tokenizer, eos)
