"""What this room needs of a model: its chat template and its tokenizer. Both are called from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TemplateError(ValueError):
    """The chat template refused these messages; the message is the template's own."""


class Template(Protocol):
    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Raises TemplateError.

        `kwargs` are extra template variables: plain data, or `clock.VARIABLE`, a callable.
        """
        ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added at either end, special tokens in the text become their ids."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens included."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, at least 1."""
        ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text to id of every special token."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...


class Eyes(Protocol):
    """How a model with eyes reads an image's mark. Thread-safe."""

    def places(self, width: int, height: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Tokens before an image of this size, how many places it has, and tokens behind it."""
        ...

    def problem(self, width: int, height: int) -> str:
        """Why an image of this size cannot be shown, ``""`` if it can."""
        ...

    def key(self, identity: str) -> str:
        """Names the image as this model's processor sees it."""
        ...

    def prepare(self, picture: Any) -> dict[str, Any]:
        """What the processor makes of a picture (RGB, Pillow's): arrays by name."""
        ...
