"""Where a place of the prompt comes from: which message, field and rule. For explaining misses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from start_llm.core.messages import Message
from start_llm.prompt.notes import NOTE_OPEN
from start_llm.prompt.render import Rendered
from start_llm.prompt.turns import Shown
from start_llm.prompt.view import Entry

_SNIPPET = 80


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the client's request.

    Attributes:
        message: index of the client's message, or None (tools, generation prompt).
        field: ``system``, ``tools``, ``content``, ``reasoning``, ``tool_calls``, ``note``, ``generation``, ...
        rule: the volatile rule that matched there.
        text: the prompt's text around it.
    """

    message: int | None
    field: str | None
    rule: str | None
    text: str


def _snippet(message: Message) -> str:
    for text in (message.content, message.reasoning or ""):
        if stripped := text.strip():
            return stripped[:_SNIPPET].rstrip()
    return message.tool_calls[0].name if message.tool_calls else ""


def message_offsets(text: str, messages: Sequence[Message]) -> list[int | None]:
    """Character offset at which each message's own words begin in the rendered text; None where they are not found."""
    offsets: list[int | None] = []
    position = 0
    for message in messages:
        snippet = _snippet(message)
        found = text.find(snippet, position) if snippet else -1
        offsets.append(found if found >= 0 else None)
        if found >= 0:
            position = found + (
                len(message.content.strip()) if snippet and snippet in message.content else len(snippet)
            )
    return offsets


def locate(
    rendered: Rendered,
    marks: Sequence[int],
    shown: Sequence[Shown],
    entries: Sequence[Entry],
    char: int,
    around: str,
) -> Where:
    """The message that character `char` of the rendered text belongs to.

    Args:
        marks: character offsets, ascending, at which messages begin in the text.
    """
    if char >= rendered.generation:
        return Where(None, "generation", None, around)
    messages = [item.message for item in shown]
    offsets = message_offsets(rendered.text, messages)
    best = max((i for i, start in enumerate(_starts(offsets, marks)) if start <= char), default=None)
    if best is None:
        return Where(None, "tools" if rendered.head and char < rendered.head else None, None, around)
    message, offset = messages[best], offsets[best]
    assert offset is not None
    index = _client_index(shown, entries, best)
    field = _field(message, rendered, offset, char)
    return Where(index, field, _rule(entries[index], char - offset) if index is not None else None, around)


def _starts(offsets: Sequence[int | None], marks: Sequence[int]) -> Iterator[float]:
    """Where each message begins: at its mark, or with its own words if it shares the mark with one before it."""
    previous = -1
    for offset in offsets:
        if offset is None:
            yield inf
            continue
        index = bisect_right(marks, offset)
        mark = marks[index - 1] if index else 0
        yield offset if mark == previous else mark
        previous = mark


def _client_index(shown: Sequence[Shown], entries: Sequence[Entry], best: int) -> int | None:
    link = shown[best].link
    for index, entry in enumerate(entries):
        if (link is not None and entry.link == link) or entry.facts.shown == shown[best].message:
            return index
    return None


def _field(message: Message, rendered: Rendered, offset: int, char: int) -> str:
    if message.role == "system":
        end = offset + len(message.content.strip())
        return "tools" if char >= end and rendered.head and char < rendered.head else "system"
    if message.role != "assistant":
        note = message.content.rfind(NOTE_OPEN)
        return "note" if 0 <= note <= char - offset else "content"
    place = rendered.text.find(message.content.strip(), max(0, offset)) if message.content.strip() else -1
    if place >= 0 and char >= place + len(message.content.strip()):
        return "tool_calls" if message.tool_calls else "content"
    if place >= 0 and char >= place:
        return "content"
    if message.reasoning and (place >= 0 or not message.tool_calls):
        return "reasoning"
    return "tool_calls" if message.tool_calls else "content"


def _rule(entry: Entry, place: int) -> str | None:
    for field in entry.facts.fields:
        if field.start - len(field.line) <= place <= field.end + 8:
            return field.rule.name
    return None
