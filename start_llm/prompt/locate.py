"""Where a place of the prompt comes from: message, field and rule. For explaining misses, off the request path."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from start_llm.core.messages import Message
from start_llm.core.report import Miss
from start_llm.prompt.guard import CUT
from start_llm.prompt.note import NOTE_CLOSE, NOTE_OPEN
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.reading import ChainEntry, MessageChain
from start_llm.prompt.tree import Rendering, ShownMessage

_SNIPPET = 80


def locate(prepared: Prepared, miss: Miss, char: int) -> Miss:
    """`miss` with the client's message (if any), field and declared place that character `char` of the text is from."""
    rendering, shown, chain = prepared.rendering, prepared.view.shown, prepared.chain
    if char >= rendering.generation:
        return replace(miss, field="generation")
    messages = [one.message for one in shown]
    offsets = _offsets(rendering.text, messages)
    marks = [anchor.char for anchor in rendering.anchors if anchor.start]
    best = max((i for i, start in enumerate(_starts(offsets, marks)) if start <= char), default=None)
    if best is None:
        return replace(miss, field="tools" if rendering.head and char < rendering.head else None)
    message, offset = messages[best], offsets[best]
    assert offset is not None
    entry = _entry_of(shown[best], chain)
    miss = replace(miss, message=None, rule=None, field=_field(message, rendering, offset, char))
    if entry is None:
        return miss
    parts = (part for part in entry.facts.parts if part.start <= char - offset <= part.end + 8)
    return replace(miss, message=entry.index, rule=next((part.rule.name for part in parts), None))


def _snippet(message: Message) -> str:
    words = message.content.strip() or (message.reasoning or "").strip()
    return words[:_SNIPPET].rstrip() or (message.tool_calls[0].name if message.tool_calls else "")


def _offsets(text: str, messages: Sequence[Message]) -> list[int | None]:
    """Character offset at which each message's own words begin in the rendered text; None where they are not found."""
    offsets: list[int | None] = []
    position = 0
    for message in messages:
        snippet = _snippet(message)
        found = _find(text, snippet, position)
        offsets.append(found if found >= 0 else None)
        if found >= 0:
            own = snippet in message.content
            position = found + (len(message.content.strip()) if own else len(snippet))
    return offsets


def _find(text: str, snippet: str, start: int) -> int:
    """Where it stands, if need be with cuts in it; -1: nowhere."""
    found = text.find(snippet, start) if snippet else -1
    if found < 0 and snippet and CUT in text:
        cut = re.compile(f"{CUT}?".join(map(re.escape, snippet))).search(text, start)
        found = cut.start() if cut is not None else -1
    return found


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


def _entry_of(shown: ShownMessage, chain: MessageChain) -> ChainEntry | None:
    if shown.place is not None and shown.place < len(chain.indices):
        return chain.entries[chain.indices[shown.place]]
    same = (entry for entry in chain.entries if entry.facts.shown == shown.message)
    return next(same, chain.entries[0] if shown.message.role == "system" else None)


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
        return char <= content.find(NOTE_CLOSE)
    note = content.rfind(NOTE_OPEN)
    return 0 <= note <= char


def _part_of_answer(message: Message, text: str, offset: int, char: int) -> str:
    behind = "tool_calls" if message.tool_calls else "content"
    words = message.content.strip()
    place = text.find(words, max(0, offset)) if words else -1
    if 0 <= place <= char:
        return "content" if char < place + len(words) else behind
    return "reasoning" if message.reasoning and (place >= 0 or not message.tool_calls) else behind
