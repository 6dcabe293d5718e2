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
    """What the template does.

    Attributes:
        system: it shows a leading system message.
        systems: it shows several leading system messages.
        mid_system: it shows a system message in the middle, in its place.
        repeats: it takes two messages of one role in a row.
        assistant_first: it takes a conversation that begins with an assistant turn.
        tools: it shows tool definitions.
        calls: how it takes a call's arguments: ``mapping``, ``string``, or None if it shows no calls.
        string_too: with ``mapping``, arguments as a string are shown as well.
        results: it shows tool messages.
        reasoning_key: the message key it reads reasoning from, or None.
        reasoning_beside_text: a turn with calls may have both reasoning and text.
        reasoning_inline: it shows thinking tags in the content of past turns.
        old_reasoning: it shows reasoning of turns before the last user message.
        switches: template variables that turn thinking on and off.
        preserve: it takes ``preserve_thinking``.
        many_calls: it takes several calls in one assistant message.
        short_ids: it refuses call ids that are not nine letters and digits.
        starts: special tokens that begin a message.
        structure: special tokens that it writes.
        dates: formats of the dates that it prints by itself, of no message.
        fingerprint: of everything it rendered here, and the tokens of that.
    """

    system: bool = True
    systems: bool = True
    mid_system: bool = True
    repeats: bool = True
    assistant_first: bool = True
    tools: bool = True
    calls: str | None = "mapping"
    string_too: bool = False
    results: bool = True
    reasoning_key: str | None = None
    reasoning_beside_text: bool = True
    reasoning_inline: bool = False
    old_reasoning: bool = False
    switches: tuple[str, ...] = ()
    preserve: bool = False
    many_calls: bool = True
    short_ids: bool = False
    starts: frozenset[str] = frozenset()
    structure: frozenset[str] = frozenset()
    dates: tuple[str, ...] = ()
    fingerprint: str = field(default="", compare=False)
