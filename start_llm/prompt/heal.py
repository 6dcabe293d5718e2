"""Healing: gives back to an assistant turn what its client stripped or rewrote without changing what it says.

The store maps what a turn says (text and canonical calls) to how it was generated: its reasoning, its exact text and
argument strings. Equal turns of one conversation are told apart by the conversation before them. A turn that a client
changed has another key, so it is never overwritten.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.canonical import answer_key, digest_of, from_history

CAPACITY = 2000
# What Claude Code, OpenCode and OpenClaw put in place of an old tool result to save context.
CLEARED = "[Old tool result content cleared]"
_EMBEDDED = re.compile(r"\s*<(think|thinking)>((?:(?!</?\1>)[\s\S])*)</\1>")
_NOTHING: tuple[Any, ...] = (False, None, "", [], {})
# aider's mark for reasoning in its files (aider/reasoning_tags.py).
_FILED = re.compile(r"<(?P<tag>thinking-content-[0-9a-f]{32})>(?P<reasoning>[\s\S]*?)</(?P=tag)>")


@dataclass(frozen=True, slots=True)
class Healed:
    """How a turn was generated."""

    content: str
    reasoning: str | None
    arguments: tuple[str, ...]
    names: tuple[str, ...] = ()


def _same_arguments(generated: str, sent: str) -> bool:
    try:
        return _same(json.loads(generated or "{}"), json.loads(sent or "{}"))
    except ValueError:
        return False


def _empty(value: Any) -> bool:
    return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


def _same(one: Any, other: Any) -> bool:
    """Equal but for members that one of them has and that say nothing: Claude Code adds ``"replace_all": false``."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(
            _same(one[key], other[key]) if key in one and key in other else _empty({**one, **other}[key])
            for key in one.keys() | other.keys()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def split_embedded(content: str) -> tuple[str | None, str]:
    """Thinking that `content` begins with, inside its tags, and the rest; ``(None, content)`` if there is none."""
    match = _EMBEDDED.match(content)
    return (match.group(2).strip(), content[match.end() :].lstrip("\n")) if match else (None, content)


def cleared(message: Message) -> bool:
    """A tool result that its client has taken out of the conversation."""
    return message.role == "tool" and message.content.strip() == CLEARED


def filed_turns(messages: Sequence[Message]) -> dict[int, list[str]]:
    """Answers in a client's own history file, by the index of their first message: all behind a user message of it."""
    turns: dict[int, list[str]] = {}
    parts: list[str] | None = None
    for index, message in enumerate(messages):
        if message.tool_calls or message.reasoning:
            parts = None
        elif message.role != "assistant":
            parts = [] if message.role == "user" and from_history(message.content) is not None else None
        elif parts is not None:
            turns.setdefault(index - len(parts), parts)
            parts.append(message.content)
    return turns


def _filed(content: str) -> tuple[str, bytes]:
    """Reasoning and text of an answer as far as aider's history file keeps them (aider/utils.py,
    `split_chat_history_markdown`): lines that look like a heading or a quotation are gone, blank ones come and go."""
    match = _FILED.search(content)
    text = _FILED.sub("", content) if match else content
    lines = (line.strip() for line in text.split("\n") if not line.startswith(("# ", "> ")))
    return match["reasoning"].strip() if match else "", digest_of([line for line in lines if line])


class HealingStore:
    """The last `capacity` generated turns, least recently used first out. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._turns: OrderedDict[tuple[bytes, bytes], Healed] = OrderedDict()
        self._newest: dict[bytes, tuple[bytes, bytes]] = {}
        self._thoughts: dict[bytes, Counter[str | None]] = {}
        self._files: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        self._called: dict[bytes, tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, parent: bytes, answer: Message) -> tuple[bytes, Healed] | None:
        """Remembers a generated turn after the conversation `parent`; returns its key and entry.

        A turn that says nothing is not remembered: every empty turn would match it.
        """
        if not answer.content.strip() and not answer.tool_calls:
            return None
        key = answer_key(answer.content, answer.tool_calls)
        calls = answer.tool_calls
        arguments, names = tuple(call.arguments for call in calls), tuple(call.name for call in calls)
        entry = Healed(answer.content, answer.reasoning, arguments, names)
        self.restore(parent, key, entry)
        return key, entry

    def restore(self, parent: bytes, key: bytes, entry: Healed) -> None:
        """Puts an entry back that `put` returned earlier, e.g. from disk."""
        with self._lock:
            if (parent, key) in self._turns:
                self._forget_thought(key, self._turns[parent, key])
            self._thoughts.setdefault(key, Counter())[entry.reasoning] += 1
            self._turns[parent, key] = entry
            self._turns.move_to_end((parent, key))
            self._newest[key] = (parent, key)
            if entry.arguments:
                self._called[parent] = (parent, key)
            else:
                self._files[parent, _filed(entry.content)[1]] = (parent, key)
            while len(self._turns) > self._capacity:
                gone, old = self._turns.popitem(last=False)
                self._forget_thought(gone[1], old)
                self._files.pop((gone[0], _filed(old.content)[1]), None)
                if self._called.get(gone[0]) == gone:
                    del self._called[gone[0]]
                if self._newest.get(gone[1]) == gone:
                    del self._newest[gone[1]]

    def _forget_thought(self, key: bytes, entry: Healed) -> None:
        thoughts = self._thoughts[key]
        thoughts[entry.reasoning] -= 1
        if not thoughts[entry.reasoning]:
            del thoughts[entry.reasoning]
        if not thoughts:
            del self._thoughts[key]

    def heal(self, parent: bytes, message: Message) -> Message:
        """`message` as it was generated, if it says the same; else as it came.

        The client's reasoning stands where it differs from the generated one. Reasoning that `content` carries too is
        taken once.
        """
        if message.role != "assistant":
            return message
        embedded, body = split_embedded(message.content)
        if embedded is not None and (message.reasoning is None or message.reasoning.strip() == embedded):
            entry = self._find(parent, answer_key(body, message.tool_calls))
            if entry is not None and (entry.reasoning or "").strip() == embedded:
                return _rebuilt(message, entry)
        key = answer_key(message.content, message.tool_calls)
        entry = None if (parent, key) in self._turns else self._completed(parent, message)
        entry = entry or self._find(parent, key)
        if entry is not None:
            said = (message.reasoning or "").strip()
            healed = _rebuilt(message, entry)
            if said and said != (entry.reasoning or "").strip():
                return replace(healed, reasoning=message.reasoning)
            return healed
        if embedded is not None and message.reasoning is not None and message.reasoning.strip() == embedded:
            return replace(message, reasoning=None)
        return message

    def from_file(self, parent: bytes, parts: list[str]) -> Message | None:
        """The turn that stands in a client's history file as these assistant messages, one behind the other.

        None if no turn of this very conversation is known that reads so, or if it was thought otherwise.
        """
        reasoning, digest = _filed("\n".join(parts))
        with self._lock:
            entry = self._turns.get(self._files.get((parent, digest), (b"", b"")))
        if entry is None or (reasoning and reasoning != (entry.reasoning or "").strip()):
            return None
        return Message("assistant", entry.content, reasoning=entry.reasoning)

    def _completed(self, parent: bytes, message: Message) -> Healed | None:
        """The last turn with calls at this place, if `message` is that but for arguments that say nothing."""
        if not message.tool_calls:
            return None
        with self._lock:
            place = self._called.get(parent)
            entry = self._turns[place] if place is not None else None
        if entry is None or len(entry.arguments) != len(message.tool_calls):
            return None
        if entry.content.strip() != message.content.strip() or entry.names != tuple(c.name for c in message.tool_calls):
            return None
        pairs = zip(entry.arguments, (call.arguments for call in message.tool_calls), strict=True)
        return entry if all(_same_arguments(generated, sent) for generated, sent in pairs) else None

    def _find(self, parent: bytes, key: bytes) -> Healed | None:
        with self._lock:
            place = (parent, key)
            if place not in self._turns:
                newest = self._newest.get(key)
                if newest is None or len(self._thoughts[key]) > 1:
                    # Said in several conversations with different thoughts: those of another one are not shown here.
                    return None
                place = newest
            self._turns.move_to_end(place)
            return self._turns[place]


def _rebuilt(message: Message, entry: Healed) -> Message:
    calls = tuple(
        ToolCall(call.id, call.name, arguments)
        for call, arguments in zip(message.tool_calls, entry.arguments, strict=True)
    )
    return replace(message, content=entry.content, reasoning=entry.reasoning, tool_calls=calls)
