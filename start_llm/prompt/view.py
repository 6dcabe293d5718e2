"""What the model is shown: as before up to the base's answer, the rest as sent, and a note for what changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message, Tool
from start_llm.prompt.clients import DeclaredPlace
from start_llm.prompt.match import DATE, BaseMatch, Change, MatchQuery, definition
from start_llm.prompt.note import note_of
from start_llm.prompt.reading import ChainEntry, Slot
from start_llm.prompt.tree import Path, Shown

_SHARE = 10  # what the client did not send may be a tenth of what it sent
_MOST_CHANGES = 1000  # of one note; each is looked for in what follows
_SLACK = 16  # tokens: white space that clients take off answers


@dataclass(frozen=True, slots=True)
class View:
    """What to render.

    Attributes:
        base: what it goes on from, or None: then all is as sent.
        new: the messages behind the base's answer; of a client's transient message, `transient` is the last.
        told: what they and the note tell, by slot.
        notes: the note's lines.
        noted: characters and tokens of all notes on the way, this one included.
        extra: it shows something that the request does not say.
        foreign: it shows words that neither the request nor its own thoughts say.
    """

    base: Path | None
    new: tuple[Shown, ...]
    tools: tuple[Tool, ...]
    told: tuple[tuple[Slot, str | None], ...] = ()
    notes: tuple[str, ...] = ()
    noted: tuple[int, int] = (0, 0)
    transient: bool = False
    extra: bool = False
    foreign: bool = False

    @property
    def shown(self) -> tuple[Shown, ...]:
        return (*(self.base.shown if self.base is not None else ()), *self.new)

    @property
    def messages(self) -> list[Message]:
        return [shown.message for shown in self.shown]


def strictly(messages: Sequence[Message], tools: Sequence[Tool]) -> View:
    """The client's messages, and nothing else."""
    return View(None, tuple(Shown(message, None) for message in messages), tuple(tools))


def as_sent(asked: MatchQuery, tools: Sequence[Tool]) -> View:
    """The request without a base; `tools` are its tools in the order to show."""
    entries = asked.reading.entries
    told = dict(asked.reading.values)
    if asked.date is not None:
        told[DATE] = asked.date
    return View(
        None,
        tuple(Shown(entry.facts.shown, entry.place) for entry in entries if _says(entry)),
        tuple(tools),
        tuple(told.items()),
        transient=bool(entries) and entries[-1].transient,
    )


def going_on(match: BaseMatch, asked: MatchQuery, tokens_in: Callable[[str], int]) -> View | None:
    """The request as the conversation of `match` goes on; None if that would show too much that it does not say."""
    path, entries = match.path, asked.reading.entries
    new, told, changes = _behind(path, entries[match.behind :])
    said = _last_said(asked)
    changes = [change for change in (*match.changes, *changes) if not _still_said(change, said)]
    if len(changes) > _MOST_CHANGES:
        return None
    told.update((change.slot, change.new) for change in changes)
    lines: tuple[str, ...] = ()
    noted = path.node.noted
    if changes:
        note = note_of([_with_repetition(change, new) for change in changes], path.node.nonce)
        place = _bearer(new, entries[-1].transient)
        if note is None or place is None:
            return None
        lines = note
        text = "\n".join(lines)
        new[place] = _with_note(new[place], text)
        noted = (noted[0] + len(text), noted[1] + tokens_in(text))
    if not _is_modest(path, new, asked, noted):
        return None
    return View(
        path,
        tuple(new),
        path.tools,
        tuple(told.items()),
        lines[1:-1],
        noted,
        transient=entries[-1].transient,
        extra=not match.exact or bool(changes),
        foreign=match.foreign or bool(changes),
    )


def _last_said(asked: MatchQuery) -> dict[tuple[str, str], int]:
    """The last place of each text of a declared place, by its rule and what it says."""
    last: dict[tuple[str, str], int] = {}
    for slot, text in asked.reading.values.items():
        last[slot.rule, text] = max(slot.place, last.get((slot.rule, text), slot.place))
    return last


def _still_said(change: Change, said: Mapping[tuple[str, str], int]) -> bool:
    """Whether a text that is gone from its place stands in a later one: telling of its going would be wrong."""
    gone = change.slot
    if change.new is not None or change.old is None or gone.rule in ("tool", "system"):
        return False
    return said.get((gone.rule, change.old), gone.place) > gone.place


def _with_repetition(change: Change, new: Sequence[Shown]) -> Change:
    """A note stands behind the newest message: it must not take back what that message says."""
    if not change.old or change.new is not None or change.slot.rule in ("tool", "system"):
        return change
    return replace(change, repeated=any(change.old in one.message.content for one in new))


def _says(entry: ChainEntry) -> bool:
    """A message of which only telemetry was left out is left out with it."""
    return entry.facts.shown == entry.message or bool(entry.facts.shown.content.strip())


def _behind(path: Path, entries: Sequence[ChainEntry]) -> tuple[list[Shown], dict[Slot, str | None], list[Change]]:
    """What is shown behind the answer, what that tells, and what is told in a note instead.

    A block that its client moves stays where it was shown: it is left out here, its changes are told.
    """
    new: list[Shown] = []
    told: dict[Slot, str | None] = {}
    changes: list[Change] = []
    left_out = False
    for index, entry in enumerate(entries):
        left_out = left_out and entry.reply
        message, last = entry.facts.shown, index == len(entries) - 1
        for slot, part in entry.slots:
            was = path.told.get(slot)
            settled = part.rule.moves and was is not None and not (last and entry.place is None)
            change = Change(slot, was, part.text, part.rule)
            if settled and was != part.text:
                settled = note_of([change], "") is not None
                changes += [change] * settled
            told[slot] = part.text
            if settled:
                message = replace(message, content=_left_of(message.content, part))
                left_out = entry.place is None
        if _says(entry) and not left_out:
            new.append(Shown(message, entry.place))
    return new, told, changes


def _left_of(content: str, part: DeclaredPlace) -> str:
    """The message without the block, with which it ends."""
    return content[: part.start].rstrip()


def _bearer(new: Sequence[Shown], transient: bool) -> int | None:
    """Which message bears the note: the last of the user or a tool that will stay."""
    last = len(new) - 1 if transient else len(new)
    places = [index for index in range(last) if new[index].message.role in ("user", "tool")]
    return places[-1] if places else None


def _with_note(shown: Shown, note: str) -> Shown:
    content = shown.message.content
    return replace(shown, message=replace(shown.message, content=f"{content}\n\n{note}" if content else note))


def _embedded(entry: ChainEntry) -> int:
    """Characters of reasoning that the client sends inside the text of an answer; templates leave them out."""
    return 0 if entry.facts.shown.reasoning else len(entry.facts.reasoning)


def _defined(tools: Sequence[Tool]) -> int:
    """Characters of their definitions."""
    return sum(len(definition(tool)) for tool in tools)


def _kept(path: Path, entries: Sequence[ChainEntry]) -> int:
    """Characters that are still shown of results which the client has cleared."""
    cleared = [entry for entry in entries if entry.facts.parts and entry.cleared and entry.place is not None]
    if not cleared:
        return 0
    contents = {shown.place: shown.message.content for shown in path.shown}
    return sum(max(0, len(contents.get(one.place, "")) - len(one.message.content)) for one in cleared)


def _is_modest(path: Path, new: Sequence[Shown], asked: MatchQuery, noted: tuple[int, int]) -> bool:
    """What is shown beyond the request's own words is at most a tenth of them; results that were cleared may stay.

    Notes are counted in tokens. Other text is counted by its characters, at the rate of the conversation without notes.
    """
    entries = asked.reading.entries
    sent = sum(len(entry.facts.shown.content) - _embedded(entry) for entry in entries)
    called = sum(len(call.name) + len(call.arguments) for entry in entries for call in entry.message.tool_calls)
    shown = path.chars + sum(len(one.message.content) for one in new)
    tools = _defined(asked.tools)
    known = tools if asked.tools == path.tools else _defined(path.tools)
    old_chars, old_tokens = path.node.noted
    rate = (len(path.rendering.tokens) - old_tokens) / max(1, len(path.rendering.text) - old_chars)
    beyond = (shown + known - _kept(path, entries) - sent - tools - noted[0]) * rate + noted[1]
    return beyond <= (sent + called + tools) * rate / _SHARE + (_SLACK if not noted[0] else 0)
