"""What this room needs of a model: its chat template and its tokenizer. Both are called from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

VARIABLE = "strftime_now"
"""The function that templates ask for the date. Passed to `Template.render`, it takes the real one's place."""
OWN_DATES = frozenset([VARIABLE, "date_string"])
"""Template variables by which a client sets the date itself."""


@dataclass(frozen=True, slots=True, repr=False)
class Clock:
    """A stopped clock, local time. `formats`: what the template asks it for."""

    moment: datetime
    formats: tuple[str, ...]

    def __call__(self, form: str) -> str:
        return self.moment.strftime(form)

    def __repr__(self) -> str:
        return f"Clock({self.value!r})"

    @property
    def value(self) -> str:
        """What the template prints, its formats joined."""
        return ", ".join(self.moment.strftime(form) for form in self.formats)


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

        `kwargs` are extra template variables: plain data, or `VARIABLE`, a callable.
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
