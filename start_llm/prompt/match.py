"""Finds the base of a request: the deepest answer of ours that it goes on from, as the same conversation.

The idea. Equal words of the same owner lead to candidates. What tells conversations of equal words apart is compared
here: reasoning, calls and their ids, and the values of declared places. The comparison has two results:

- the `Difference`: how much the model would be shown that the request itself does not say;
- the `Proof`: what shows that both are one conversation.

The greater the difference, the better the proof has to be (`NEEDED`): two clients of one key come to the same words by
the same question, or by a shared transcript.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from start_llm.core.messages import Message
from start_llm.core.request import ChatRequest
from start_llm.prompt.clients import Rule
from start_llm.prompt.datetimes import differ_in_times_only
from start_llm.prompt.reading import MessageChain, Slot, call_id, canonical_arguments, split_embedded
from start_llm.prompt.traits import Clock
from start_llm.prompt.tree import ConversationTree, Difference, Path, definition

PROOF_TOKENS = 64
"""Generated tokens that two conversations do not share by chance."""
_OUR_ID = re.compile(r"[a-z]*[0-9a-f]{24}")  # as `call_id` leaves what the parser makes
DATE = Slot("date")
ROLES = Slot("roles")
"""How often the whole system text was told anew, as a number."""


class Proof(IntEnum):
    """What shows that a base is the request's own conversation, the weakest first."""

    NONE = 0
    WORDS = 1  # the request carries 64 tokens that were generated for its owner
    # These, and both have the same session name. Or the request carries the id of a call that this server made, or of
    # the response that it goes on from.
    NAME = 2


NEEDED = {
    Difference.NONE: Proof.NONE,
    Difference.THOUGHTS: Proof.WORDS,
    Difference.TIMES: Proof.WORDS,
    Difference.WORDS: Proof.NAME,
}
"""The proof that a difference needs. Of a wrong time the worst is an old time with a note that tells the new one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A slot that does not say what the model was told last."""

    slot: Slot
    old: str | None  # None if it was told nothing yet
    new: str | None  # None if it is gone
    rule: Rule | None = None
    repeated: bool = False  # a newer message says it as well
    earlier: int | None = None  # index in the chain of an earlier message that says it as well
    at_top: str | None = None  # of a tool: its definition in the prompt's head

    @property
    def difference(self) -> Difference:
        is_time = self.slot == DATE
        if self.slot.rule == "system" and self.old is not None and self.new is not None:
            is_time = differ_in_times_only(self.old, self.new)
        return Difference.TIMES if is_time else Difference.WORDS


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """A base for a request."""

    path: Path
    behind: int  # index of the first entry behind the base's answer
    changes: tuple[Change, ...]  # what the model has to be told
    difference: Difference  # the greatest one of all that the base shows
    proof: Proof
    same_session: bool  # both have the same session name, or none

    @property
    def usable(self) -> bool:
        """Whether it may be used, unless another one is just as good."""
        return self.is_exact or (self.same_session and self.proof >= NEEDED[self.difference])

    @property
    def is_exact(self) -> bool:
        """The model is shown only what the request says itself."""
        return self.difference is Difference.NONE

    @property
    def thoughts(self) -> tuple[str | None, ...]:
        """Of each answer."""
        return tuple(one.message.reasoning for one in self.path.shown if one.message.role == "assistant")

    def shows_the_same(self, other: BaseMatch) -> bool:
        shown, others = ([one.message for one in match.path.shown] for match in (self, other))
        return self.changes == other.changes and shown == others


@dataclass(frozen=True)
class MatchQuery:
    """A request as it was read, and as it is compared."""

    request: ChatRequest
    chain: MessageChain
    variables: dict[str, Any]  # of the template, its own date left out
    clock: Clock | None  # for a template that prints the date by itself

    @property
    def date(self) -> str | None:
        """What the template prints of the date."""
        return self.clock.value if self.clock is not None else None

    @cached_property
    def definitions(self) -> dict[str, str]:
        """The tools' definitions by name: equal texts are equal JSON values."""
        return {tool.name: definition(tool) for tool in self.request.tools}

    @cached_property
    def systems(self) -> tuple[str, ...]:
        """The system texts at the front."""
        values = self.chain.values
        return tuple(values[slot] for slot in sorted(slot for slot in values if slot.rule == "system"))


@dataclass
class BaseSearch:
    """Iterates over the bases that may be used, the best first: deep before shallow, equal values before changed."""

    tree: ConversationTree
    query: MatchQuery
    # The deepest match that is not used, and why, for the report.
    rejected: BaseMatch | None = field(default=None, init=False)
    why: str = field(default="", init=False)

    def __iter__(self) -> Iterator[BaseMatch]:
        chain = self.query.chain
        for key, index in zip(reversed(chain.keys), reversed(chain.indices), strict=True):
            if chain.entries[index].message.role != "assistant" or not self.tree.has(key):
                continue
            paths = self.tree.at(key)
            yield from self._best([match for path in paths if (match := compare(path, self.query, index + 1))])

    def _best(self, matches: Sequence[BaseMatch]) -> Iterator[BaseMatch]:
        """An exact match, and the one that is proved to be this conversation; none where two are."""
        # The newest is the first; sorting keeps that order.
        exact = [match for match in matches if match.is_exact]
        yield from sorted(exact, key=lambda match: not match.same_session)[:1]
        others = [match for match in matches if not match.is_exact]
        if (proved := _proved(others)) is not None:
            yield proved
        elif others:
            self.reject(min(others, key=lambda match: (not match.same_session, match.difference)))

    def reject(self, match: BaseMatch, why: str = "two conversations fit") -> None:
        """Also called by who finds that a match cannot be used."""
        if self.rejected is None or match.behind > self.rejected.behind:
            self.rejected, self.why = match, why


def _proved(matches: Sequence[BaseMatch]) -> BaseMatch | None:
    """The one of these that is proved to be this conversation; None where none is, or two are."""
    usable = [match for match in matches if match.usable]
    best = [match for match in usable if not match.changes] or usable
    # An answer may have been given again in the same words: whose thoughts these are, no words can prove.
    one_of_all = len({match.thoughts for match in matches if match.same_session}) == 1
    return best[0] if best and one_of_all and all(map(best[0].shows_the_same, best)) else None


# --- one candidate ----------------------------------------------------------------------------------------------------


def compare(path: Path, query: MatchQuery, behind: int) -> BaseMatch | None:
    """How the request differs from a path of equal words; None if it cannot be the same conversation.

    `behind`: index of the first entry behind the path's answer.
    """
    answers, tools, request = _compare_answers(path, query.chain), _tool_changes(path, query), query.request
    if answers is None or tools is None or not _same_edges(path, query.chain):
        return None
    answers_differ, has_our_id = answers
    was = path.told.get(DATE)
    date = [Change(DATE, was, query.date)] if query.date not in (None, was) else []
    changes = (*date, *_value_changes(path, query, behind), *tools)
    silent = _silent_difference(path, query)
    difference = max((path.node.difference, answers_differ, silent, *(change.difference for change in changes)))
    same_session = path.node.session == request.session
    proof = Proof.WORDS if path.node.spoken >= PROOF_TOKENS else Proof.NONE
    if has_our_id or request.continued or (proof and request.session is not None and same_session):
        proof = Proof.NAME
    return BaseMatch(path, behind, changes, difference, proof, same_session)


def _compare_answers(path: Path, chain: MessageChain) -> tuple[Difference, bool] | None:
    """How the answers differ, and whether the request carries a call of ours; None if it says others."""
    difference, has_our_id = Difference.NONE, False
    for shown in path.shown:
        if shown.place is None or shown.message.role != "assistant":
            continue
        sent = chain.entries[chain.indices[shown.place]]
        if sent.facts.reasoning != (shown.message.reasoning or "").strip():
            if sent.facts.reasoning:
                return None
            difference = max(difference, Difference.THOUGHTS)
        if not shown.message.tool_calls:
            continue
        if _arguments(sent.message) != _arguments(shown.message):
            difference = Difference.WORDS  # equal but for a habit of the client
        if shown.place in path.generated:
            ids = [call_id(call.id) for call in sent.message.tool_calls]
            if ids == [call_id(call.id) for call in shown.message.tool_calls]:
                has_our_id = True
            elif any(_OUR_ID.fullmatch(one) for one in ids):
                return None  # ids are random: these calls were made in another conversation
    return difference, has_our_id


def _same_edges(path: Path, chain: MessageChain) -> bool:
    """Whether the white space around the messages is what was shown, as far as no client's own block explains it.

    The chain leaves that out. An answer may come back without it, as many clients write it down; other white space than
    was generated is its client's correction. Line breaks come and go with a user's block, blanks and tabs do not.
    """
    for one in path.shown:
        if one.place is None or one.message.role not in ("assistant", "user"):
            continue
        sent, shown = chain.entries[chain.indices[one.place]].facts.shown.content, one.message.content
        if one.message.role == "assistant":
            sent, shown = split_embedded(sent)[1], split_embedded(shown)[1]
        else:
            sent, shown = sent.strip("\n"), shown.strip("\n")
        if sent != shown and sent.strip() == shown.strip() and (one.message.role == "user" or sent not in shown):
            return False
    return True


def _arguments(message: Message) -> list[str]:
    return [canonical_arguments(call) for call in message.tool_calls]


def _value_changes(path: Path, query: MatchQuery, behind: int) -> list[Change]:
    """What declared places say now in what is answered, and what has been withdrawn."""
    values = query.chain.values
    answered: dict[Slot, Rule | None] = {slot: None for slot in values if slot.rule == "system"}
    for entry in query.chain.entries[:behind]:
        answered.update((slot, part.rule) for slot, part in entry.slots)
    differ = [(slot, rule) for slot, rule in answered.items() if path.told.get(slot) != values[slot]]
    stamps = _stamps(query)
    gone = [slot for slot in _slots_shown(path) if slot not in values and slot.rule not in stamps]
    changes = [Change(slot, path.told.get(slot), values[slot], rule) for slot, rule in differ]
    changes += [Change(slot, path.told[slot], None) for slot in gone]
    return sorted(changes, key=lambda change: (change.slot.place, change.slot.rule, change.slot.number))


def _silent_difference(path: Path, query: MatchQuery) -> Difference:
    """What is shown otherwise than it is sent, though nobody has to be told.

    THOUGHTS: a block stands elsewhere now. WORDS: a stamp that its client does not send any more, or the old text of a
    block that moves: what it says now is told behind the base's answer.
    """
    values, stamps = query.chain.values, _stamps(query)
    shown = _slots_shown(path)
    moved = [slot for slot in shown if slot.place < 0 and slot in values]
    gone = any(slot.rule in stamps and slot not in values for slot in shown)
    if gone or any(path.told[slot] != values[slot] for slot in moved):
        return Difference.WORDS
    return Difference.THOUGHTS if moved else Difference.NONE


def _stamps(query: MatchQuery) -> set[str]:
    return {rule.name for rule in query.chain.client.rules if rule.kind == "stamp"}


def _slots_shown(path: Path) -> list[Slot]:
    """The declared places of messages and of the system text that have a value on the path."""
    others = ("tool", "date", "roles")
    return [slot for slot, was in path.told.items() if was is not None and slot.rule not in others]


def _tool_changes(path: Path, query: MatchQuery) -> list[Change] | None:
    """What differs from the tools that the model knows; None where the prompt's head does not say how to call any."""
    if query.request.tools and not path.tools:
        return None
    known: dict[str, str | None] = dict(path.definitions)
    known.update((slot.name, value) for slot, value in path.told.items() if slot.rule == "tool")
    now = query.definitions
    names = [name for name in dict.fromkeys([*now, *known]) if known.get(name) != now.get(name)]
    top = path.definitions
    return [Change(Slot("tool", name=name), known.get(name), now.get(name), at_top=top.get(name)) for name in names]
