"""Canonical forms: what a message *says*, with its volatile fields taken out, as a hash.

The canonical form finds a conversation again; it never becomes part of a prompt. Facts are kept per message, so that a
turn pays for its new messages only.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.volatile import Field, Rules

ROOT = b"start_llm chain"
_LINE_BREAKS = re.compile(r"[ \t]*\n+")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one message.

    Attributes:
        digest: of the canonical form.
        counts: False for a message whose canonical form is empty; it is no link of the chain.
        transient: the whole message is of the kind ``transient``.
        fields: its volatile fields; telemetry is not among them.
        shown: the message without its telemetry.
        removed: characters that the rules took out or replaced.
    """

    digest: bytes
    counts: bool
    transient: bool
    fields: tuple[Field, ...]
    shown: Message
    removed: int


@lru_cache(maxsize=4096)
def canonical_arguments(arguments: str) -> str:
    """Arguments parsed, with sorted keys; text that is not JSON stays as it is, trimmed."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments.strip()
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@lru_cache(maxsize=4096)
def answer_key(content: str, calls: tuple[ToolCall, ...]) -> bytes:
    """The identity of an assistant turn, however a client writes it down: its text and its calls, ids left out."""
    parts = [content.strip()]
    for call in calls:
        parts += (call.name, canonical_arguments(call.arguments))
    return digest_of(parts)


def digest_of(parts: list[str]) -> bytes:
    """SHA-256 of the parts, their lengths included."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def body_links(head: int, digests: Sequence[bytes]) -> list[bytes]:
    """A chain without the `head` system messages at its front: hashes after each message behind them."""
    parent, links = digest_of(["body", str(head)]), []
    for digest in digests:
        parent = link(parent, digest)
        links.append(parent)
    return links


def link(parent: bytes, digest: bytes) -> bytes:
    """The chain's hash after a message."""
    return hashlib.sha256(parent + digest).digest()


def _cut(text: str, fields: tuple[Field, ...], marker: str = "") -> str:
    """`text` with its fields replaced by their markers; an empty marker takes its line break along.

    `marker` stands for all markers that are not empty.
    """
    result = ""
    position = 0
    for field in fields:
        result += text[position : field.start]
        position = field.end
        if field.rule.marker:
            result += marker or field.rule.marker
        elif not text[position:].strip():
            # Without a block that moves, the message has the white space that its writer gave it.
            result = result.removesuffix("\n\n") if field.rule.kind == "moving" else result.rstrip()
            position = len(text)
        elif (not result or result.rstrip(" \t").endswith("\n")) and (gap := _LINE_BREAKS.match(text, position)):
            position = gap.end()
    return result + text[position:]


def from_history(content: str) -> str | None:
    """A user message that a client read back from a Markdown file, as it was before; None if it is not one.

    aider ends every line with the two spaces of a Markdown line break (aider/io.py, `append_chat_history`).
    """
    lines = content.split("\n")
    if len(lines) < 2 or lines[-1] or not all(line.endswith("  ") for line in lines[:-1]):
        return None
    return "\n".join(line[:-2] for line in lines[:-1])


def _plain(message: Message) -> list[str]:
    # White space at the end of what a user says comes and goes with the client's way to keep it.
    content = message.content.rstrip() if message.role == "user" else message.content
    return [message.role, content, message.name or "", "error" if message.is_error else ""]


def facts_of(message: Message, rules: Rules) -> Facts:
    """Computes a message's facts. Assistant turns are canonical as they are: their text and calls, ids left out."""
    if message.role == "assistant":
        reasoning = (message.reasoning or "").strip()
        key = answer_key(message.content, message.tool_calls)
        return Facts(digest_of(["assistant", key.hex(), reasoning]), True, False, (), message, 0)
    fields = rules.find(message)
    before = from_history(message.content) if message.role == "user" else None
    if before is not None and not fields and not rules.find(said := replace(message, content=before)):
        return replace(facts_of(said, rules), shown=message)
    if not fields:
        return Facts(digest_of(_plain(message)), True, False, (), message, 0)
    telemetry = tuple(field for field in fields if field.rule.kind == "telemetry")
    others = tuple(field for field in fields if field.rule.kind != "telemetry")
    shown = replace(message, content=_cut(message.content, telemetry)) if telemetry else message
    canonical = _cut(message.content, fields)
    whole = message.content.strip()
    transient = any(field.rule.kind == "transient" and field.text.strip() == whole for field in others)
    counts = message.role == "tool" or bool(canonical.strip())
    digest = digest_of(_plain(replace(message, content=canonical)))
    return Facts(digest, counts, transient, others, shown, sum(field.end - field.start for field in fields))


@lru_cache(maxsize=128)
def lasting_text(message: Message, rules: Rules) -> str:
    """The text of a message that is no assistant turn, dots for its volatile values."""
    return _cut(message.content, rules.find(message), "...")


def is_reply(message: Message, before: Facts) -> bool:
    """The client made this assistant message up to follow a block, the message whose facts are `before`."""
    if message.role != "assistant" or before.counts or message.tool_calls:
        return False
    replies = (field.rule.reply for field in before.fields)
    return any(reply is not None and reply.fullmatch(message.content.strip()) for reply in replies)


class FactsMemory:
    """Facts of recent messages, bounded by their characters. Thread-safe."""

    def __init__(self, rules: Rules, limit_chars: int = 32_000_000) -> None:
        self._rules = rules
        self._limit = limit_chars
        self._chars = 0
        self._facts: OrderedDict[Message, Facts] = OrderedDict()
        self._lock = threading.Lock()

    def lasting(self, message: Message) -> str:
        """See `lasting_text`."""
        return lasting_text(message, self._rules)

    def get(self, messages: list[Message]) -> list[Facts]:
        """Facts of `messages`, in order."""
        with self._lock:
            found = [self._facts.get(message) for message in messages]
        result = []
        fresh: list[tuple[Message, Facts]] = []
        for message, known in zip(messages, found, strict=True):
            if known is None:
                known = facts_of(message, self._rules)
                fresh.append((message, known))
            result.append(known)
        if fresh:
            self._keep(fresh)
        return result

    def _keep(self, fresh: list[tuple[Message, Facts]]) -> None:
        with self._lock:
            for message, facts in fresh:
                if message not in self._facts:
                    self._chars += len(message.content) + 500
                self._facts[message] = facts
            while self._chars > self._limit and len(self._facts) > 1:
                oldest, _ = self._facts.popitem(last=False)
                self._chars -= len(oldest.content) + 500
