"""What a chat template does, as `probe` finds it out, and the date that it may print.

Imports nothing of transformers: commands that load no model read this, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

VARIABLE = "strftime_now"
"""The function that templates ask for the date. Passed to `HFTemplate.render`, it takes the real one's place."""
OWN_DATES = frozenset([VARIABLE, "date_string"])
"""Template variables by which a client sets the date itself."""


class TemplateError(ValueError):
    """The chat template refused these messages; the message is the template's own."""


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


@dataclass(frozen=True, slots=True)
class Traits:
    """What the template does."""

    system: bool = True  # it shows a leading system message
    systems: bool = True  # it shows several leading system messages
    mid_system: bool = True  # it shows a system message in the middle, in its place
    repeats: bool = True  # it takes two messages of one role in a row
    assistant_first: bool = True  # it takes a conversation that begins with an assistant turn
    tools: bool = True  # it shows tool definitions
    calls: str | None = "mapping"  # how it takes arguments: ``mapping``, ``string``, or None if it shows no calls
    string_too: bool = False  # with ``mapping``, arguments as a string are shown as well
    results: bool = True  # it shows tool messages
    reasoning_key: str | None = None  # the message key it reads reasoning from, or None
    reasoning_beside_text: bool = True  # a turn with calls may have both reasoning and text
    reasoning_inline: bool = False  # it shows thinking tags in the content of past turns
    old_reasoning: bool = False  # it shows reasoning of turns before the last user message
    switches: tuple[str, ...] = ()  # template variables that turn thinking on and off
    preserve: bool = False  # it takes ``preserve_thinking``
    many_calls: bool = True  # it takes several calls in one assistant message
    short_ids: bool = False  # it refuses call ids that are not nine letters and digits
    starts: frozenset[str] = frozenset()  # special tokens that begin a message
    structure: frozenset[str] = frozenset()  # special tokens that it writes
    dates: tuple[str, ...] = ()  # formats of the dates that it prints by itself, of no message
    fingerprint: str = field(default="", compare=False)  # of everything it rendered here, and the tokens of that
