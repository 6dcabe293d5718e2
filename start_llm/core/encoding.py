"""Texts to vectors: what the HTTP edge may ask of an encoder model. `encoders` implements it; tests fake it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from start_llm.core.service import ModelCard

Text = str | tuple[int, ...]
"""A text, or the ids of its tokens without the model's own special tokens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """
    Attributes:
        vectors: (texts, dimensions), float32, each of length 1.
        tokens: of all texts together, special tokens included.
        cut: texts that were too long, so that their vectors tell of their beginning only.
    """

    vectors: Any
    tokens: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class EncodingProgress:
    """So many of all tokens are computed."""

    done: int
    total: int


class Encoding(Protocol):
    """Texts on their way, a step of the model for each part. `result` is there when the parts are over."""

    result: Encoded

    def __iter__(self) -> Iterator[EncodingProgress]: ...


class Encoders(Protocol):
    """Thread-safe; called on HTTP threads."""

    def named(self, asked: str) -> str:
        """The name of the encoder that `asked` means. Raises NotFound, NotSupported."""
        ...

    def encode(self, texts: Sequence[Text], param: str, *, truncate: bool, dimensions: int | None) -> Encoding:
        """Checks the texts; the iteration computes.

        Args:
            param: the request's field that holds the texts, for errors.
            truncate: a text that is too long is cut; else it is an error.
            dimensions: the first so many of the model's, brought to length 1 again; ``None``: all.

        Raises:
            BadRequest, NotSupported, Unavailable, OutOfMemory.
        """
        ...

    def cards(self) -> tuple[ModelCard, ...]: ...
