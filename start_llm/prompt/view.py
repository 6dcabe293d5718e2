"""What the model is shown: as before up to the base's answer, the rest as sent, and a note for what changed.

The idea. Up to the base's answer stands what this conversation was shown then, byte for byte, so that its stored KV
fits. Behind it stands what the request says. Where the request says something else in the first part now, a note at the
end of the second part tells it. So nothing that was sent is hidden, and the newest value of a place is said last.
What no note can tell (`note.note_of`) ends the match: an earlier base is taken, or all is shown as sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message, Tool
from start_llm.prompt.clients import DeclaredPlace
from start_llm.prompt.match import DATE, ROLES, BaseMatch, Change, MatchQuery
from start_llm.prompt.note import note_of, told_of
from start_llm.prompt.reading import ChainEntry, Slot
from start_llm.prompt.tree import Difference, Path, ShownMessage

_SHARE = 10  # what the client did not send may be a tenth of what it sent
_MOST_CHANGES = 1000  # of one note; each is looked for in what follows
_MOST_ROLES = 5  # of one path: whole system texts that a note tells
_SLACK = 16  # tokens: white space that clients take off answers


@dataclass(frozen=True, slots=True)
class View:
    """What to render."""

    base: Path | None  # what it goes on from, or None: then all is as sent
    new: tuple[ShownMessage, ...]  # the messages behind the base's answer
    tools: tuple[Tool, ...]
    told: tuple[tuple[Slot, str | None], ...] = ()  # what they and the note tell, by slot
    notes: tuple[str, ...] = ()  # the note's lines
    noted: tuple[int, int] = (0, 0)  # characters and tokens of all notes on the way, this one included
    transient: bool = False  # the last message is a transient one of its client
    difference: Difference = Difference.NONE  # what it shows beyond the request's own words

    @property
    def shown(self) -> tuple[ShownMessage, ...]:
        return (*(self.base.shown if self.base is not None else ()), *self.new)

    @property
    def messages(self) -> list[Message]:
        return [shown.message for shown in self.shown]


def as_sent(query: MatchQuery, tools: Sequence[Tool]) -> View:
    """The request without a base; `tools` are its tools in the order to show."""
    entries = query.chain.entries
    told = query.chain.values | ({DATE: query.date} if query.date is not None else {})
    shown = tuple(ShownMessage(entry.facts.shown, entry.place) for entry in entries if _says(entry))
    return View(None, shown, tuple(tools), tuple(told.items()), transient=entries[-1].facts.has("transient"))


def going_on(match: BaseMatch, query: MatchQuery, tokens_in: Callable[[str], int]) -> View | str:
    """The request as the conversation of `match` goes on; why not, if that would show too much beyond its words."""
    path, entries = match.path, query.chain.entries
    transient = entries[-1].facts.has("transient")
    messages, told, moved = _tail(path, entries[match.behind :])
    noted, roles = path.node.noted, int(path.told.get(ROLES) or 0)
    notes: tuple[str, ...] = ()
    replaced = False
    last_places = _last_places(query)
    changes = [change for change in (*match.changes, *moved) if not _still_said(change, last_places)]
    if len(changes) > _MOST_CHANGES:
        return "too much has changed"
    if changes:
        note = note_of([_elsewhere(change, messages, last_places) for change in changes], path, query)
        place = _note_place(messages, transient)
        if note is None or place is None:
            return "what changed cannot be told in a note"
        roles, replaced = roles + note.is_role, note.replaces
        if roles > _MOST_ROLES:
            return f"the system text was another one {_MOST_ROLES} times already"
        text, notes = "\n".join(note.lines), note.lines[1:-1]
        messages[place] = _with_note(messages[place], text)
        noted = (noted[0] + len(text), noted[1] + tokens_in(text))
        if note.is_role:
            told[ROLES] = str(roles)
            if len(text) * _SHARE > sum(_chars_sent(query)):
                return "the new system text is longer than a tenth of the conversation"
    if not _shows_little_more(path, messages, query, noted, replaced):
        return "a note of what changed would be longer than a tenth of it"
    told.update((change.slot, change.new) for change in changes)
    difference = max((match.difference, *(change.difference for change in changes)))
    return View(path, tuple(messages), path.tools, tuple(told.items()), notes, noted, transient, difference)


def _last_places(query: MatchQuery) -> dict[tuple[str, str], int]:
    """The last place of each text of a declared place, by its rule and what it says."""
    values = sorted(query.chain.values.items(), key=lambda item: item[0].place)
    return {(slot.rule, text): slot.place for slot, text in values}


def _still_said(change: Change, last_places: Mapping[tuple[str, str], int]) -> bool:
    """Whether a text that is gone from its place stands in a later one, or in another one of the same message: telling
    of its going would be wrong. So it is where the first of two blocks goes and the second takes its place."""
    gone = change.slot
    if change.new is not None or change.old is None or gone.rule in ("tool", "system"):
        return False
    return last_places.get((gone.rule, change.old), gone.place - 1) >= gone.place


def _elsewhere(change: Change, new: Sequence[ShownMessage], last_places: Mapping[tuple[str, str], int]) -> Change:
    """A note stands behind the newest message: it must not take back what that message says, or one that stays."""
    if not change.old or change.new is not None or change.slot.rule in ("tool", "system"):
        return change
    earlier = last_places.get((change.slot.rule, change.old))
    return replace(change, repeated=any(change.old in one.message.content for one in new), earlier=earlier)


def _says(entry: ChainEntry) -> bool:
    """A message of which only telemetry was left out is left out with it."""
    return entry.facts.shown == entry.message or bool(entry.facts.shown.content.strip())


def _tail(path: Path, entries: Sequence[ChainEntry]) -> tuple[list[ShownMessage], dict[Slot, str | None], list[Change]]:
    """What is shown behind the base's answer, the values that it tells, and the changes that a note has to tell.

    A block that its client moves stays where it was shown: it is left out here, its changes are told.
    """
    messages: list[ShownMessage] = []
    told: dict[Slot, str | None] = {}
    changes: list[Change] = []
    left_out = False
    for index, entry in enumerate(entries):
        left_out = left_out and entry.reply
        message, newest = entry.facts.shown, index == len(entries) - 1 and entry.place is None
        for slot, part in entry.slots:
            told[slot] = part.text
            if not newest and _stands_further_up(path, slot, part, changes):
                message = replace(message, content=message.content[: part.start].rstrip())  # it ends with the block
                left_out = entry.place is None
        if _says(entry) and not left_out:
            messages.append(ShownMessage(message, entry.place))
    return messages, told, changes


def _stands_further_up(path: Path, slot: Slot, part: DeclaredPlace, changes: list[Change]) -> bool:
    """Whether a block that its client moves is shown already; what it says otherwise now is added to `changes`."""
    before = path.told.get(slot)
    if not part.rule.moves or before is None:
        return False
    if before != part.text:
        change = Change(slot, before, part.text, part.rule)
        if told_of(change) is None:
            return False
        changes.append(change)
    return True


def _note_place(messages: Sequence[ShownMessage], transient: bool) -> int | None:
    """Which message the note stands in: the last of the user or a tool that will stay."""
    last = len(messages) - 1 if transient else len(messages)
    return max((index for index in range(last) if messages[index].message.role in ("user", "tool")), default=None)


def _with_note(shown: ShownMessage, note: str) -> ShownMessage:
    """A user's words stand behind the note: a model answers what it reads last. A tool's result stands before it."""
    content = shown.message.content
    parts = (note, content) if shown.message.role == "user" else (content, note)
    return replace(shown, message=replace(shown.message, content="\n\n".join(filter(None, parts))))


def _shows_little_more(
    path: Path, new: Sequence[ShownMessage], query: MatchQuery, noted: tuple[int, int], replaced: bool
) -> bool:
    """Whether a view shows at most a tenth beyond the request's own words. Results that were cleared may stay.

    What the head has too much does not count: this conversation sent it, and a note takes it back. `replaced`: nothing
    of its system text holds. Notes are counted in tokens. Other text is counted by its characters, at the rate of the
    conversation without notes.
    """
    entries = query.chain.entries
    sent, called, tools = _chars_sent(query)
    shown = path.chars + sum(len(one.message.content) for one in new) - _cleared_but_shown(path, entries)
    shown += min(tools, sum(map(len, path.definitions.values())))
    shown -= max(0, sum(map(len, path.systems)) - (0 if replaced else sum(map(len, query.systems))))
    old_chars, old_tokens = path.node.noted
    rate = (len(path.rendering.tokens) - old_tokens) / max(1, len(path.rendering.text) - old_chars)
    beyond = (shown - sent - tools - noted[0]) * rate + noted[1]
    return beyond <= (sent + called + tools) * rate / _SHARE + (_SLACK if not noted[0] else 0)


def _chars_sent(query: MatchQuery) -> tuple[int, int, int]:
    """Characters of the request's messages, of the calls in them, and of its tools."""
    entries = query.chain.entries
    # Reasoning that the client sends inside the text of an answer is left out by templates.
    thoughts = sum(len(entry.facts.reasoning) for entry in entries if not entry.facts.shown.reasoning)
    sent = sum(len(entry.facts.shown.content) for entry in entries) - thoughts
    called = sum(len(call.name) + len(call.arguments) for entry in entries for call in entry.message.tool_calls)
    return sent, called, sum(map(len, query.definitions.values()))


def _cleared_but_shown(path: Path, entries: Sequence[ChainEntry]) -> int:
    """Characters that are still shown of results which the client has cleared."""
    cleared = [entry for entry in entries if entry.facts.has("cleared") and entry.place is not None]
    if not cleared:
        return 0
    contents = {shown.place: shown.message.content for shown in path.shown}
    return sum(max(0, len(contents.get(one.place, "")) - len(one.message.content)) for one in cleared)
