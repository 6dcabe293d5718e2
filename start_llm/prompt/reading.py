"""A request as the conversation tree reads it: what each message says, and the values of its declared places.

What a message says, its declared places left out, is a digest; the digests of a conversation are a chain of keys, one
after each message. What differs in declared places is compared by slot. None of this ever becomes part of a prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from start_llm.core.messages import Message, ToolCall, with_calls_together
from start_llm.files.lru import Lru
from start_llm.prompt.clients import UNKNOWN, ClientRules, Clients, DeclaredPlace, find_parts, space_end

_EMBEDDED = re.compile(r"\s*<(think|thinking)>((?:(?!</?\1>)[\s\S])*)</\1>")
_EDGES = ("start", "end", "rest")
_ID_CHARS = 1024
_KEPT_CHARS = 32_000_000
_NOT_WORDS = re.compile(r"[^0-9a-z]")


class Slot(NamedTuple):
    """A place whose value may change from request to request."""

    rule: str  # the rule's name, or ``system`` (a system message at the front), ``tool``, ``date`` (the template's own)
    place: int = -1  # index in the chain of the message it stands in; -1 for what belongs to no message
    number: int = 0  # counts the slots of a rule in a message (of all messages, where the client moves it)
    name: str = ""  # the tool's
    # Of a message of declared places only, which is no link: how many of these stand between the last link and it,
    # itself included; 0 in a link.
    before: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one message by itself."""

    digest: bytes  # of what it says, its declared places left out
    parts: tuple[DeclaredPlace, ...]  # its declared places; what is dropped is not among them
    shown: Message  # the message without what is dropped
    counts: bool = True  # False if it has declared places only; it is no link of the chain then
    reasoning: str = ""  # of an assistant turn, in its field or inside its text

    def has(self, kind: str) -> bool:
        """Whether a declared place of that kind is in the message."""
        return any(part.rule.kind == kind for part in self.parts)


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """A message of the request."""

    message: Message
    facts: Facts
    index: int  # in the request, for people: calls of one answer may stand in several messages there
    place: int | None  # its index in the chain, None if it is no link of it
    slots: tuple[tuple[Slot, DeclaredPlace], ...] = ()  # its declared places whose values are compared
    reply: bool = False  # its client made it up to follow a block that it moves


@dataclass(frozen=True)
class MessageChain:
    """A request's messages as entries, and its chain."""

    client: ClientRules
    root: bytes  # where the owner's chains begin
    entries: tuple[ChainEntry, ...]
    keys: tuple[bytes, ...]  # the chain's key behind each link; it stands for all words up to there
    indices: tuple[int, ...]  # of the links in `entries`
    values: dict[Slot, str]  # what the declared places say now, the system messages at the front included

    @property
    def links(self) -> list[ChainEntry]:
        return [self.entries[index] for index in self.indices]

    @property
    def last_key(self) -> bytes:
        return self.keys[-1] if self.keys else self.root


# --- what a message says ----------------------------------------------------------------------------------------------


def canonical_arguments(call: ToolCall, client: ClientRules = UNKNOWN) -> str:
    """A call's arguments, equal for equal JSON values; text that is not JSON stays as it is, trimmed.

    What `client` is known to add to its calls is left out.
    """
    try:
        value = json.loads(call.arguments or "{}")
        if isinstance(value, dict):
            for habit in client.habits:
                added = habit.tool == call.name and habit.key in value
                if added and _json(value[habit.key]) == _json(habit.value):
                    del value[habit.key]
        return _json(value)
    except (ValueError, RecursionError):
        return call.arguments.strip()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(*parts: str) -> bytes:
    """BLAKE2b of the parts, their lengths included."""
    digest = hashlib.blake2b(digest_size=24)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def link(parent: bytes, digest: bytes) -> bytes:
    """The chain's key behind `parent` and a message."""
    return hashlib.blake2b(parent + digest, digest_size=24).digest()


def split_embedded(content: str) -> tuple[str | None, str]:
    """Thinking that `content` begins with, inside its tags, and the rest; ``(None, content)`` if there is none."""
    match = _EMBEDDED.match(content)
    return (match.group(2).strip(), content[match.end() :].lstrip("\n")) if match else (None, content)


def call_id(given: str | None) -> str:
    """A call's id as it can be told through clients that leave out characters; of a very long one a digest."""
    text = given or ""
    if len(text) > _ID_CHARS:
        return f"long:{digest_of(text).hex()}"
    return _NOT_WORDS.sub("", text.lower())


def answer_digest(content: str, calls: Sequence[ToolCall], client: ClientRules) -> bytes:
    """What an assistant turn says, however `client` writes it down: its text and its calls, ids left out."""
    parts = ["assistant", content.strip()]
    for call in calls:
        parts += (call.name, canonical_arguments(call, client))
    return digest_of(*parts)


def _assistant_facts(message: Message, client: ClientRules) -> Facts:
    shown, content, reasoning = message, message.content, (message.reasoning or "").strip()
    embedded, body = split_embedded(content)
    if embedded is not None and reasoning in ("", embedded):
        # Thoughts that the text carries too are taken once.
        shown = replace(message, reasoning=None) if reasoning else message
        content, reasoning = body, embedded
    return Facts(answer_digest(content, message.tool_calls, client), (), shown, reasoning=reasoning)


def _without(text: str, parts: Sequence[DeclaredPlace]) -> str:
    """`text` without `parts` and the white space between them and its edges."""
    kept: list[str] = []
    position, said = 0, False
    for part in parts:
        kept.append(text[position : part.start])
        said = said or bool(kept[-1].strip())
        position = part.end if said else space_end(text, part.end)
    before, rest = "".join(kept), text[position:]
    return before + rest if rest.strip() else before.rstrip()


def facts_of(message: Message, client: ClientRules, system: str = "") -> Facts:
    """See `find_parts` for `system`."""
    if message.role == "assistant":
        return _assistant_facts(message, client)
    found = find_parts(message, client, system)
    parts = tuple(part for part in found if part.rule.kind != "drop")
    dropped = [part for part in found if part.rule.kind == "drop"]
    shown = replace(message, content=_cut(message.content, dropped)) if dropped else message
    says = _own_words(message, found, client)
    digest = digest_of(message.role, says, message.name or "", "error" if message.is_error else "", *message.images)
    return Facts(digest, parts, shown, counts=message.role == "tool" or not found or bool(says.strip()))


def _own_words(message: Message, found: Sequence[DeclaredPlace], client: ClientRules) -> str:
    """The message without its declared blocks; a result that was cleared is still its own."""
    cut = [part for part in found if part.rule.kind != "cleared"]
    says = _without(message.content, cut) if cut else message.content
    if any(rule.role == message.role and rule.place in _EDGES for rule in client.rules):
        return says.strip()  # a block that comes or goes takes the white space between it and the words along
    return says


def _cut(text: str, parts: Sequence[DeclaredPlace]) -> str:
    starts, ends = [part.start for part in parts], [part.end for part in parts]
    return "".join(text[end:start] for end, start in zip([0, *ends], [*starts, len(text)], strict=True))


# --- the request ------------------------------------------------------------------------------------------------------


class ChainReader:
    """Reads requests. Facts of recent messages are kept, bounded by their characters. Thread-safe."""

    def __init__(self, clients: Clients, *, as_sent: bool = False) -> None:
        """`as_sent`: calls of one answer stay in the messages that they came in."""
        self.clients, self._as_sent = clients, as_sent
        self._facts: Lru[tuple[str, Message], Facts] = Lru(_KEPT_CHARS, lambda key, _: key[1].chars + 500)

    def read(
        self,
        messages: Sequence[Message],
        owner: str | None,
        result_of: Callable[[str], bytes | None] = lambda call: None,
        client: ClientRules | None = None,
    ) -> MessageChain:
        """The request's entries and chain. `owner`: see `ChatRequest.owner`; `client`: if the system text does not
        show it.

        `result_of`: the digest of the result that a call had (by `call_id`), for a result that its client cleared;
        None: the result is read as cleared.
        """
        client = client or self.clients.of(messages)
        last = len(messages) - 1
        lead = leading_systems(messages)
        system = "\n\n".join(message.content for message in messages[:lead])
        root = digest_of("conversation", "" if owner is None else f"of {owner}")  # no owner's key is one of another's
        chain = _Chain(root, result_of)
        for index, message in enumerate(messages) if self._as_sent else with_calls_together(messages):
            # A system message behind the leading ones is searched for nothing.
            facts = self._facts_of(message, UNKNOWN if message.role == "system" and index >= lead else client, system)
            if index < lead:
                chain.begin(index, message, facts)
            else:
                chain.add(index, message, facts, last=index == last)
        entries, keys, indices = tuple(chain.entries), tuple(chain.keys), tuple(chain.indices)
        return MessageChain(client, chain.root, entries, keys, indices, chain.values)

    def _facts_of(self, message: Message, rules: ClientRules, system: str) -> Facts:
        facts = self._facts.get((rules.name, message))
        if facts is None:
            facts = facts_of(message, rules, system)
            if all(part.rule.place != "rest" for part in facts.parts):  # that depends on the system text
                self._facts.put((rules.name, message), facts)
        return facts


class _Chain:
    """A request's entries and chain, as its messages are read one by one."""

    def __init__(self, root: bytes, result_of: Callable[[str], bytes | None]) -> None:
        self.root = root
        self._result_of = result_of
        self.entries: list[ChainEntry] = []
        self.keys: list[bytes] = []
        self.indices: list[int] = []
        self.values: dict[Slot, str] = {}
        self._moved: Counter[str] = Counter()
        self._before = 0
        self._calls: dict[str, int] = {}

    def begin(self, index: int, message: Message, fact: Facts) -> None:
        """A system message at the front: a declared place, no link."""
        self.values[Slot("system", len(self.entries))] = fact.shown.content
        self.entries.append(ChainEntry(message, replace(fact, counts=False, parts=()), index, None))

    def add(self, index: int, message: Message, fact: Facts, *, last: bool) -> None:
        if not last and fact.has("transient"):
            fact = facts_of(message, UNKNOWN)
        if _is_reply(message, self.entries):
            self.entries.append(ChainEntry(message, fact, index, None, reply=True))
            return
        place = len(self.keys) if fact.counts else None
        self._before = 0 if fact.counts else self._before + 1
        slots = _slots(fact, Slot("", len(self.keys), before=self._before), self._moved) if fact.parts else ()
        self.values.update((slot, part.text) for slot, part in slots)
        self.entries.append(ChainEntry(message, fact, index, place, slots))
        if message.role == "assistant":
            self._calls = call_numbers(message.tool_calls)
        if place is not None:
            before = self._result_of(call_id(message.tool_call_id)) if fact.has("cleared") else None
            self.indices.append(len(self.entries) - 1)
            digest = (before or fact.digest) + _answered(message, self._calls)
            self.keys.append(link(self.keys[-1] if self.keys else self.root, digest))


def leading_systems(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def _is_reply(message: Message, before: Sequence[ChainEntry]) -> bool:
    if message.role != "assistant" or message.tool_calls or not before or before[-1].place is not None:
        return False
    replies = (part.rule.reply for part in before[-1].facts.parts)
    return any(reply is not None and re.fullmatch(reply, message.content.strip()) for reply in replies)


def _slots(facts: Facts, here: Slot, moved: Counter[str]) -> tuple[tuple[Slot, DeclaredPlace], ...]:
    """The slots of a message, which stands where `here` says; `moved` counts those that belong to no message."""
    found_here: Counter[str] = Counter()
    found = []
    for part in facts.parts:
        name, kind = part.rule.name, part.rule.kind
        if kind in ("stamp", "state"):
            where, count = (Slot(""), moved) if part.rule.moves else (here, found_here)
            found.append((where._replace(rule=name, number=count[name]), part))
            count[name] += 1
    return tuple(found)


def call_numbers(calls: Sequence[ToolCall]) -> dict[str, int]:
    """Each call's number by its id; of equal ids the first one's."""
    return {call_id(call.id): number for number, call in reversed(list(enumerate(calls)))}


def _answered(message: Message, calls: dict[str, int]) -> bytes:
    """Which of the calls before it a result answers: ids may change on the way, their order does not."""
    if message.role != "tool":
        return b""
    number = calls.get(call_id(message.tool_call_id))
    if number is None:
        return b"\xfe"
    return bytes([number]) if number < 254 else number.to_bytes(4, "little")
