"""Where a place of the prompt comes from: message, field and rule. For explaining misses, off the request path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from start_llm.core.messages import Message
from start_llm.prompt.note import NOTE_OPEN
from start_llm.prompt.reading import ChainEntry, MessageChain
from start_llm.prompt.tree import Rendering, ShownMessage

_SNIPPET = 80


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the client's request.

    Attributes:
        message: index of the client's message, or None (tools, generation prompt).
        field: ``system``, ``tools``, ``content``, ``reasoning``, ``tool_calls``, ``note``, ``generation``, ...
        rule: the declared place that it lies in.
        text: the prompt's text around it.
    """

    message: int | None
    field: str | None
    rule: str | None
    text: str


def locate(
    rendered: Rendering,
    marks: Sequence[int],
    shown: Sequence[ShownMessage],
    chain: MessageChain,
    char: int,
    around: str,
) -> Where:
    """The message that character `char` of the rendered text belongs to.

    Args:
        marks: character offsets, ascending, at which messages begin in the text.
    """
    if char >= rendered.generation:
        return Where(None, "generation", None, around)
    messages = [one.message for one in shown]
    offsets = _offsets(rendered.text, messages)
    best = max((i for i, start in enumerate(_starts(offsets, marks)) if start <= char), default=None)
    if best is None:
        return Where(None, "tools" if rendered.head and char < rendered.head else None, None, around)
    message, offset = messages[best], offsets[best]
    assert offset is not None
    index = _client_index(shown[best], chain)
    field = _field(message, rendered, offset, char)
    return Where(index, field, _rule(chain.entries[index], char - offset) if index is not None else None, around)


def _snippet(message: Message) -> str:
    for text in (message.content, message.reasoning or ""):
        if stripped := text.strip():
            return stripped[:_SNIPPET].rstrip()
    return message.tool_calls[0].name if message.tool_calls else ""


def _offsets(text: str, messages: Sequence[Message]) -> list[int | None]:
    """Character offset at which each message's own words begin in the rendered text; None where they are not found."""
    offsets: list[int | None] = []
    position = 0
    for message in messages:
        snippet = _snippet(message)
        found = text.find(snippet, position) if snippet else -1
        offsets.append(found if found >= 0 else None)
        if found >= 0:
            own = snippet in message.content
            position = found + (len(message.content.strip()) if own else len(snippet))
    return offsets


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


def _client_index(shown: ShownMessage, chain: MessageChain) -> int | None:
    if shown.place is not None and shown.place < len(chain.indices):
        return chain.indices[shown.place]
    same = (index for index, entry in enumerate(chain.entries) if entry.facts.shown == shown.message)
    return next(same, 0 if shown.message.role == "system" else None)


def _field(message: Message, rendered: Rendering, offset: int, char: int) -> str:
    if message.role == "system":
        end = offset + len(message.content.strip())
        return "tools" if char >= end and char < rendered.head else "system"
    if message.role != "assistant":
        return "note" if _is_in_note(message.content, char - offset) else "content"
    return _part_of_answer(message, rendered.text, offset, char)


def _is_in_note(content: str, char: int) -> bool:
    """A note stands at the beginning of a user's message, or at the end of a tool's."""
    if content.startswith(NOTE_OPEN):
        end = content.find("</" + content[1 : content.find(" ")])
        return char <= end
    note = content.rfind(NOTE_OPEN)
    return 0 <= note <= char


def _part_of_answer(message: Message, text: str, offset: int, char: int) -> str:
    behind = "tool_calls" if message.tool_calls else "content"
    words = message.content.strip()
    place = text.find(words, max(0, offset)) if words else -1
    if 0 <= place <= char:
        return "content" if char < place + len(words) else behind
    return "reasoning" if message.reasoning and (place >= 0 or not message.tool_calls) else behind


def _rule(entry: ChainEntry, place: int) -> str | None:
    parts = (part for part in entry.facts.parts if part.start <= place <= part.end + 8)
    return next((part.rule.name for part in parts), None)
