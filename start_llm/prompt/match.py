"""Finds the base of a request: the deepest answer of ours that it goes on from, as the same conversation.

Equal words lead to candidates; what tells conversations of equal words apart is compared here: reasoning, the ids of
calls, and the values of declared places. A candidate is *exact* if the model would be shown nothing by it that the
request does not say itself. Any other one needs proof that it is the same conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from start_llm.core.messages import Tool
from start_llm.core.request import ChatRequest
from start_llm.prompt.clients import Rule
from start_llm.prompt.reading import Reading, Slot, call_id
from start_llm.prompt.tree import Path, Tree

PROOF_TOKENS = 64
_OUR_ID = re.compile(r"[a-z]*[0-9a-f]{24}")  # as `call_id` leaves what the parser makes
DATE = Slot("date")


@dataclass(frozen=True, slots=True)
class Change:
    """A slot that does not say what the model was told last.

    `old`: None if the model was told nothing yet; `new`: None if it is gone.
    """

    slot: Slot
    old: str | None
    new: str | None
    rule: Rule | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A base for a request.

    Attributes:
        behind: index of the first entry behind the base's answer.
        changes: what the model has to be told.
        restored: it gives back reasoning that the request does not carry.
        kept: it shows what the client does not send any more, though nobody has to be told.
        proved: the request carries a call of ours, or enough of our words.
    """

    path: Path
    behind: int
    changes: tuple[Change, ...]
    restored: bool
    kept: bool
    proved: bool

    @property
    def exact(self) -> bool:
        return self.path.node.clean and not (self.changes or self.restored or self.kept)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is compared: what it says, its tools, the template's own date (if it prints one), who asks."""

    reading: Reading
    tools: tuple[Tool, ...]
    date: str | None
    owner: str | None
    session: str | None

    @staticmethod
    def of(request: ChatRequest, reading: Reading, date: str | None) -> Asked:
        return Asked(reading, request.tools, date, request.owner, request.session)


def bases(tree: Tree, asked: Asked) -> Iterator[Match]:
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


def _proved(found: Sequence[Match], asked: Asked) -> Iterator[Match]:
    """The one match among `found` that is proved to be this conversation; none where two are."""
    allowed = [match for match in found if match.proved and _is_own(match, asked)]
    pool = [match for match in allowed if not match.changes] or allowed
    if pool and all(_told_alike(match, pool[0]) for match in pool):
        yield pool[0]


def _is_own(match: Match, asked: Asked) -> bool:
    """Neither another name of the conversation nor another user or key stands against it."""
    node = match.path.node
    return (node.owner, node.session) == (asked.owner, asked.session)


def _told_alike(one: Match, other: Match) -> bool:
    return one.changes == other.changes and [s.message for s in one.path.shown] == [s.message for s in other.path.shown]


# --- one candidate ----------------------------------------------------------------------------------------------------


def compare(path: Path, asked: Asked, behind: int) -> Match | None:
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
    values, kept = _value_changes(path, asked, behind)
    proved = named or path.node.spoken >= PROOF_TOKENS
    return Match(path, behind, (*_date_change(path, asked.date), *values, *tools), restored, kept, proved)


def _compare_answers(path: Path, reading: Reading) -> tuple[bool, bool] | None:
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


def _value_changes(path: Path, asked: Asked, behind: int) -> tuple[list[Change], bool]:
    """What declared places say now in what is answered, and whether something is shown that was withdrawn silently."""
    values, rules = asked.reading.values, asked.reading.client.rules
    answered: dict[Slot, Rule | None] = {slot: None for slot in values if slot.rule == "system"}
    for entry in asked.reading.entries[:behind]:
        answered.update((slot, part.rule) for slot, part in entry.slots)
    changes = [
        Change(slot, path.told.get(slot), values[slot], rule)
        for slot, rule in answered.items()
        if path.told.get(slot) != values[slot]
    ]
    stamps = {rule.name for rule in rules if rule.kind == "stamp"}
    shown = [slot for slot, was in path.told.items() if was is not None and slot.rule not in ("tool", "date")]
    gone = [slot for slot in shown if slot not in values]
    changes += [Change(slot, path.told[slot], None) for slot in gone if slot.rule not in stamps]
    # A stamp that is gone, and a block that its client moves on, stay where they were shown.
    kept = any(slot.rule in stamps for slot in gone) or any(slot.place < 0 for slot in shown if slot in values)
    return sorted(changes, key=lambda change: (change.slot.place, change.slot.rule, change.slot.number)), kept


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
