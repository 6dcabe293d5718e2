"""How models mark their thinking: one table, for prompts that open a block and for answers that hold one."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReasoningStyle:
    """A pair of tags around reasoning."""

    id: str
    # `start`, `end`: the tags; both ``""`` where the model has none
    start: str = ""
    end: str = ""
    also_ends: tuple[str, ...] = ()  # further tags that end it
    drop: tuple[str, ...] = ()  # further structural markup that is never shown
    channels: bool = False  # gpt-oss's harmony: messages with headers instead of tags
    # models without tags of their own write these as plain text, because a prompt asked them to or because they
    # learned it from other models. They are looked for in the answers of every model that has tags.
    spoken: bool = False


_LISTS = ("also_ends", "drop")
_TABLE = tomllib.loads(Path(__file__).with_name("reasoning_tags.toml").read_text("utf-8"))["style"]
REASONING_STYLES: dict[str, ReasoningStyle] = {
    row["id"]: ReasoningStyle(**row | {name: tuple(row[name]) for name in _LISTS if name in row}) for row in _TABLE
}

REASONING_TAGS: tuple[tuple[str, str], ...] = tuple(
    (style.start, style.end) for style in REASONING_STYLES.values() if style.start
)
"""Every known pair of an opening and a closing tag."""


def reasoning_style(start: str, end: str) -> ReasoningStyle:
    """The style with these tags: one of ours, or a new one named after its opening tag."""
    known = (style for style in REASONING_STYLES.values() if start and (style.start, style.end) == (start, end))
    return next(known, ReasoningStyle(start or "null", start, end))
