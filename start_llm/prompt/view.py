"""What the model is shown: under ``append`` the same bytes as before, and one note that says what differs now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message, Tool
from start_llm.prompt.canonical import Facts
from start_llm.prompt.clock import SLOT, date_line
from start_llm.prompt.toolorder import ToolOrder
from start_llm.prompt.turns import Record, Shown, Told

NOTE_OPEN = "<update-note>"
NOTE_CLOSE = "</update-note>"
_NOTE_INTRO = "Changed since first shown above; these are current:"


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the request: healed, its facts, and the chain's hash after it (None if it does not count)."""

    message: Message
    facts: Facts
    link: bytes | None


@dataclass(frozen=True, slots=True)
class View:
    """What to render. `matched` messages at the front are shown as before; `notes` are the lines of the update note.

    `strict`: the messages are the client's, byte for byte.
    """

    shown: tuple[Shown, ...]
    tools: tuple[Tool, ...]
    notes: tuple[str, ...] = ()
    matched: int = 0
    strict: bool = False


@dataclass(slots=True)
class _Change:
    told: Told
    line: str


def _reminder_slot(text: str) -> str:
    return "reminder:" + hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _slots(facts: Facts, position: int) -> list[tuple[str, str, str, str]]:
    """(slot, kind, value, line) of every field of the message at chain `position`."""
    result = []
    counts: dict[str, int] = {}
    for field in facts.fields:
        rule = field.rule
        if rule.kind in ("reminder", "transient"):
            result.append((_reminder_slot(field.text), "reminder", field.text.strip(), field.text.strip()))
            continue
        number = counts.get(rule.name, 0)
        counts[rule.name] = number + 1
        slot = f"{rule.kind}:{position}:{rule.name}:{number}"
        result.append((slot, rule.kind, field.text.strip(), field.line))
    return result


def _told(facts: Facts, position: int) -> tuple[Told, ...]:
    return tuple((slot, value) for slot, _, value, _ in _slots(facts, position)) if facts.fields else ()


def _definition(tool: Tool) -> str:
    return json.dumps(tool.as_function(), ensure_ascii=False, sort_keys=True)


def as_sent(entries: Sequence[Entry], tools: Sequence[Tool], *, telemetry: bool) -> View:
    """The client's messages; without telemetry if `telemetry` is False."""
    return View(tuple(_shown_from(entries, 0, telemetry)), tuple(tools), strict=telemetry)


def _shown_from(entries: Sequence[Entry], position: int, telemetry: bool = False) -> list[Shown]:
    result = []
    for entry in entries:
        facts = entry.facts
        told = _told(facts, position)
        message = entry.message if telemetry else facts.shown
        if not (facts.shown is not entry.message and not message.content.strip() and not facts.counts):
            result.append(Shown(message, entry.link, told, facts.transient, facts.digest))
        position += facts.counts
    return result


def append_only(
    entries: Sequence[Entry],
    tools: Sequence[Tool],
    base: Record,
    depth: int,
    order: ToolOrder,
    *,
    continues: bool,
    dates: tuple[str, str] = ("", ""),
) -> View:
    """Shows the first `depth` messages that count as `base` showed them, and the rest as the client sent them.

    `continues`: the next message is what the model answered there. `dates`: the one that the template prints in this
    conversation, and the present one.
    """
    old = _old_shown(base, depth)
    matched = _matched(entries, depth)
    while continues and entries[matched].link is None:
        # What comes between the prompt and its answer came after the answer was given.
        matched += 1
    rest = list(entries[matched:])
    full = depth == len(base.chain)
    after = _after(base, depth)
    while after and rest and not rest[0].facts.counts and rest[0].facts.shown == after[0].message:
        old.append(after.pop(0))
        rest.pop(0)
    if full:
        old += [shown for shown in after if not shown.transient]
    spoke = continues or any(shown.message.role == "assistant" for shown in old)
    told = _fold(old)
    changes = [*_date_change(dates, told), *_field_changes(entries[:matched], told)]
    if spoke and (base.tools or not tools):
        head = base.tools
        changes += _tool_changes(tools, head, told)
    else:
        # Nothing was said with other tools yet, or the head does not say how to call any.
        head = order.arrange(tools, base.tools)
    new = _shown_from(rest, depth)
    if not changes:
        return View((*old, *new), tuple(head), (), len(old))
    return _with_note([*old, *new], tuple(head), changes, len(old))


def _old_shown(base: Record, depth: int) -> list[Shown]:
    """The record's messages up to its `depth`-th that counts."""
    result = []
    seen = 0
    for shown in base.shown:
        if seen == depth:
            break
        if not shown.transient:
            result.append(shown)
        seen += shown.link is not None
    return result


def _after(base: Record, depth: int) -> list[Shown]:
    """Messages that do not count, directly after the record's `depth`-th."""
    result = []
    seen = 0
    for shown in base.shown:
        if seen == depth:
            if shown.link is not None:
                break
            result.append(shown)
        seen += shown.link is not None
    return result


def _matched(entries: Sequence[Entry], depth: int) -> int:
    """How many entries belong to the first `depth` messages that count."""
    seen = 0
    for index, entry in enumerate(entries):
        if seen == depth:
            return index
        seen += entry.link is not None
    return len(entries)


def _fold(shown: Sequence[Shown]) -> dict[str, str]:
    told: dict[str, str] = {}
    for item in shown:
        if item.told:
            told.update(item.told)
    return told


def _date_change(dates: tuple[str, str], told: dict[str, str]) -> list[_Change]:
    printed, present = dates
    if told.get(SLOT, printed) == present:
        return []
    told[SLOT] = present
    return [_Change((SLOT, present), date_line(present))]


def _field_changes(matched: Sequence[Entry], told: dict[str, str]) -> list[_Change]:
    changes: list[_Change] = []
    present: set[str] = set()
    position = 0
    for entry in matched:
        if entry.facts.fields:
            for slot, kind, value, line in _slots(entry.facts, position):
                present.add(slot)
                if told.get(slot) == value:
                    continue
                told[slot] = value
                changes.append(_Change((slot, value), line if kind != "reminder" else value))
        position += entry.facts.counts
    for slot, value in list(told.items()):
        kind, _, rest = slot.partition(":")
        if kind == "context" and value and slot not in present and int(rest.split(":")[0]) < position:
            told[slot] = ""
            first = value.split("\n", 1)[0]
            changes.append(_Change((slot, ""), f"No longer part of the conversation's context: {first}"))
    return changes


def _tool_changes(tools: Sequence[Tool], head: Sequence[Tool], told: dict[str, str]) -> list[_Change]:
    """What the model must be told about its tools; `head` are those in the prompt's head."""
    known = {tool.name: _definition(tool) for tool in head}
    known.update({slot[5:]: value for slot, value in told.items() if slot.startswith("tool:")})
    now = {tool.name: _definition(tool) for tool in tools}
    changes = []
    for name, definition in now.items():
        if known.get(name) != definition:
            word = "This tool has changed" if known.get(name) else "This tool is now available too"
            changes.append(_Change((f"tool:{name}", definition), f"{word}: {definition}"))
    gone = [name for name, definition in known.items() if definition and name not in now]
    line = f"No longer available, do not call: {', '.join(gone)}"
    return changes + [_Change((f"tool:{name}", ""), line) for name in gone]


def _with_note(shown: list[Shown], tools: tuple[Tool, ...], changes: list[_Change], matched: int) -> View:
    lines: list[str] = []
    for change in changes:
        if change.line not in lines:
            lines.append(change.line)
    note = "\n".join([NOTE_OPEN, _NOTE_INTRO, *lines, NOTE_CLOSE])
    places = [index for index, item in enumerate(shown) if item.message.role in ("user", "tool") and not item.transient]
    told = tuple(change.told for change in changes)
    if not places:
        shown.append(Shown(Message("user", note), None, told))
        return View(tuple(shown), tools, tuple(lines), matched)
    place = places[-1]
    target = shown[place]
    content = f"{target.message.content}\n\n{note}" if target.message.content else note
    shown[place] = replace(target, message=replace(target.message, content=content), told=(*target.told, *told))
    return View(tuple(shown), tools, tuple(lines), min(matched, place))
