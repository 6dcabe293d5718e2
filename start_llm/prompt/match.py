"""Finds the base of a request: the deepest answer of ours that it goes on from, as the same conversation.

Equal words lead to candidates; what tells conversations of equal words apart is compared here: reasoning, the ids of
calls, and the values of declared places. A candidate is *exact* if the model would be shown nothing by it that the
request does not say itself. Any other one needs proof that it is the same conversation: an id of a call that this
server made, or an equal session name and enough words of ours. Words alone prove less. Two clients can come to the same
words, by the same question or by a shared transcript, and one API key is often used by all of them. So words alone give
back only thoughts, and only where nothing else is shown that the request does not say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from start_llm.core.messages import Tool
from start_llm.core.request import ChatRequest
from start_llm.prompt.clients import Rule
from start_llm.prompt.reading import MessageChain, Slot, call_id
from start_llm.prompt.tree import ConversationTree, Path

PROOF_TOKENS = 64
"""Generated tokens that two conversations do not share by chance."""
_OUR_ID = re.compile(r"[a-z]*[0-9a-f]{24}")  # as `call_id` leaves what the parser makes
DATE = Slot("date")


@dataclass(frozen=True, slots=True)
class Change:
    """A slot that does not say what the model was told last.

    `old`: None if the model was told nothing yet; `new`: None if it is gone. `repeated`: a newer message
    says it as well.
    """

    slot: Slot
    old: str | None
    new: str | None
    rule: Rule | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """A base for a request.

    Attributes:
        behind: index of the first entry behind the base's answer.
        changes: what the model has to be told.
        restored: it gives back reasoning that the request does not carry.
        moved: it shows a block in another place than its client does now.
        stale: it shows what the client does not send any more, though nobody has to be told.
        proved: it is the same conversation as far as this match shows more than the request says.
    """

    path: Path
    behind: int
    changes: tuple[Change, ...]
    restored: bool
    moved: bool
    stale: bool
    proved: bool

    @property
    def foreign(self) -> bool:
        """The model would read words that neither the request nor its thoughts say."""
        return _shows_foreign(self.path, self.changes, self.stale)

    @property
    def exact(self) -> bool:
        return not (self.foreign or self.restored or self.moved)


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """A request as it is compared: what it says, its tools, the template's own date (if it prints one), who asks."""

    reading: MessageChain
    tools: tuple[Tool, ...]
    date: str | None
    owner: str | None
    session: str | None

    @staticmethod
    def of(request: ChatRequest, reading: MessageChain, date: str | None) -> MatchQuery:
        return MatchQuery(reading, request.tools, date, request.owner, request.session)


def bases(tree: ConversationTree, asked: MatchQuery) -> Iterator[BaseMatch]:
    """Bases that may be used, the best one first: deep before shallow, equal values before changed ones."""
    reading = asked.reading
    for key, index in zip(reversed(reading.keys), reversed(reading.indices), strict=True):
        if reading.entries[index].message.role != "assistant" or not tree.has(key):
            continue
        found = [match for path in tree.at(key) if (match := compare(path, asked, index + 1)) is not None]
        exact = [match for match in found if match.exact]
        if exact:
            yield next((match for match in exact if _is_own(match, asked)), exact[0])
        yield from _proved([match for match in found if not match.exact], asked)


def _proved(found: Sequence[BaseMatch], asked: MatchQuery) -> Iterator[BaseMatch]:
    """The one match among `found` that is proved to be this conversation; none where two are."""
    allowed = [match for match in found if match.proved and _is_own(match, asked)]
    pool = [match for match in allowed if not match.changes] or allowed
    if pool and all(_told_alike(match, pool[0]) for match in pool):
        yield pool[0]


def _is_own(match: BaseMatch, asked: MatchQuery) -> bool:
    """Neither another name of the conversation nor another user or key stands against it."""
    node = match.path.node
    return (node.owner, node.session) == (asked.owner, asked.session)


def _told_alike(one: BaseMatch, other: BaseMatch) -> bool:
    return one.changes == other.changes and [s.message for s in one.path.shown] == [s.message for s in other.path.shown]


# --- one candidate ----------------------------------------------------------------------------------------------------


def compare(path: Path, asked: MatchQuery, behind: int) -> BaseMatch | None:
    """How the request differs from a path of equal words; None if it cannot be the same conversation.

    `behind`: index of the first entry behind the path's answer.
    """
    answers = _compare_answers(path, asked.reading)
    if answers is None:
        return None
    restored, named = answers
    tools = _tool_changes(path, asked.tools)
    if tools is None:
        return None
    values = _value_changes(path, asked, behind)
    moved, stale = _silent_differences(path, asked)
    changes = (*_date_change(path, asked.date), *values, *tools)
    enough = asked.session is not None or not _shows_foreign(path, changes, stale)
    proved = named or (enough and path.node.spoken >= PROOF_TOKENS)
    return BaseMatch(path, behind, changes, restored, moved, stale, proved)


def _shows_foreign(path: Path, changes: Sequence[Change], stale: bool) -> bool:
    return not path.node.clean or bool(changes) or stale


def _compare_answers(path: Path, reading: MessageChain) -> tuple[bool, bool] | None:
    """Whether thoughts would be given back, and whether the request carries a call of ours; None if it says others."""
    restored = named = False
    for shown in path.shown:
        if shown.place is None or shown.message.role != "assistant":
            continue
        sent = reading.entries[reading.indices[shown.place]]
        if sent.facts.reasoning != (shown.message.reasoning or "").strip():
            if sent.facts.reasoning:
                return None
            restored = True
        if shown.place in path.own and shown.message.tool_calls:
            ids = [call_id(call.id) for call in sent.message.tool_calls]
            if ids == [call_id(call.id) for call in shown.message.tool_calls]:
                named = True
            elif any(_OUR_ID.fullmatch(one) for one in ids):
                return None  # ids are random: these calls were made in another conversation
    return restored, named


def _date_change(path: Path, date: str | None) -> list[Change]:
    was = path.told.get(DATE)
    return [] if date is None or was == date else [Change(DATE, was, date)]


def _value_changes(path: Path, asked: MatchQuery, behind: int) -> list[Change]:
    """What declared places say now in what is answered, and what has been withdrawn."""
    values = asked.reading.values
    answered: dict[Slot, Rule | None] = {slot: None for slot in values if slot.rule == "system"}
    for entry in asked.reading.entries[:behind]:
        answered.update((slot, part.rule) for slot, part in entry.slots)
    changes = [
        Change(slot, path.told.get(slot), values[slot], rule)
        for slot, rule in answered.items()
        if path.told.get(slot) != values[slot]
    ]
    stamps = _stamps(asked)
    gone = [slot for slot in _shown(path) if slot not in values and slot.rule not in stamps]
    changes += [Change(slot, path.told[slot], None) for slot in gone]
    return sorted(changes, key=lambda change: (change.slot.place, change.slot.rule, change.slot.number))


def _silent_differences(path: Path, asked: MatchQuery) -> tuple[bool, bool]:
    """Whether a block stands elsewhere now, and whether something is shown that its client does not send any more.

    That is a stamp, or the old text of a block that moves: what it says now is told behind the base's answer.
    """
    values, stamps = asked.reading.values, _stamps(asked)
    moved = [slot for slot in _shown(path) if slot.place < 0 and slot in values]
    stale = any(path.told[slot] != values[slot] for slot in moved)
    return bool(moved), stale or any(slot.rule in stamps and slot not in values for slot in _shown(path))


def _stamps(asked: MatchQuery) -> set[str]:
    return {rule.name for rule in asked.reading.client.rules if rule.kind == "stamp"}


def _shown(path: Path) -> list[Slot]:
    """The declared places of messages and of the system text that have a value on the path."""
    return [slot for slot, was in path.told.items() if was is not None and slot.rule not in ("tool", "date")]


def definition(tool: Tool) -> str:
    return json.dumps(tool.as_function(), ensure_ascii=False, sort_keys=True)


def _tool_changes(path: Path, tools: Sequence[Tool]) -> list[Change] | None:
    """What differs from the tools that the model knows; None where the prompt's head does not say how to call any."""
    told = {slot.name: value for slot, value in path.told.items() if slot.rule == "tool"}
    if not told and {tool.name: tool for tool in tools} == {tool.name: tool for tool in path.tools}:
        return []
    if tools and not path.tools:
        return None
    known: dict[str, str | None] = {tool.name: definition(tool) for tool in path.tools}
    known.update(told)
    now: dict[str, str | None] = {tool.name: definition(tool) for tool in tools}
    names = dict.fromkeys([*now, *known])
    return [
        Change(Slot("tool", name=name), known.get(name), now.get(name))
        for name in names
        if known.get(name) != now.get(name)
    ]
