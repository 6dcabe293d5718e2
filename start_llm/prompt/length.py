"""A prompt that cannot fit the context is refused before it costs what it would cost to encode it.

A tokenizer does one to three million characters a second, so 40 MB hold a thread for most of a minute. What is within
twice the context is counted to its end, for the error to have the exact number.
"""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.errors import ContextLengthExceeded
from start_llm.prompt.ports import Tokenizer

PIECE = 1 << 16
"""Characters that are encoded at a time to find out whether a text is too long."""
_COUNTED = 2  # contexts
_PLAIN = 8  # characters a token: a text under this is encoded at once, it takes a few seconds at most


class LengthCheck:
    """
    Args:
        context: tokens that a prompt and its answer may have; 0: there is no limit.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._most = _COUNTED * context

    def check(self, texts: Sequence[str], before: int = 0) -> None:
        """Raises ContextLengthExceeded if the tokens of `texts`, behind so many others, are far too many.

        Where a text is cut changes its tokens by a few: no matter beside a whole context.
        """
        chars = sum(map(len, texts))
        if not self._context or chars <= _PLAIN * self._context:
            return
        count = before + chars // self._tokenizer.longest_token
        if count > self._most:  # whatever they say
            raise self._exceeded(count)
        count = before
        for text in texts:
            for start in range(0, len(text), PIECE):
                count += len(self._tokenizer.encode(text[start : start + PIECE]))
                if count > self._most:
                    raise self._exceeded(count)

    def _exceeded(self, tokens: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(prompt=tokens, asked=1, limit=self._context, at_least=True)
