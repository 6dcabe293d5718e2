"""The date that a template prints by itself (Llama 3.x, gpt-oss): pinned, or the prompt's head changes at midnight."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

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
