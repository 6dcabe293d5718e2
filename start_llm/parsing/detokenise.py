"""From tokens to text, whole characters only."""

from __future__ import annotations

from typing import Protocol

_BROKEN = "\ufffd"
_BEFORE = "\n"


class StreamingDetokenizer(Protocol):
    """mlx-lm's: `TokenizerWrapper.detokenizer` makes a fresh one at each access."""

    @property
    def last_segment(self) -> str: ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


class Detokenizer:
    """One per choice; one thread. A character that is not complete yet is held back.

    Args:
        streaming: a fresh streaming detokenizer.
        raw: a space at the beginning stays: the text goes on from a prompt. mlx-lm drops it from an empty text.
    """

    def __init__(self, streaming: StreamingDetokenizer, *, raw: bool = False) -> None:
        self._streaming = streaming
        if raw and "text" in vars(streaming):
            vars(streaming).update(text=_BEFORE, offset=len(_BEFORE))

    def feed(self, token: int) -> str:
        """The text that this token completes, maybe ``""``."""
        self._streaming.add_token(token)
        return self._streaming.last_segment

    def finish(self) -> str:
        """The rest. Bytes that never became a character are left out."""
        self._streaming.finalize()
        return self._streaming.last_segment.rstrip(_BROKEN)
