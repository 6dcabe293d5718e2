"""What the model is shown: under ``append`` the same bytes as before, and one note that says what differs now."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message, Tool
from start_llm.prompt.canonical import Facts
from start_llm.prompt.clock import SLOT, date_line
from start_llm.prompt.textdiff import changes as text_changes
from start_llm.prompt.textdiff import name_of
from start_llm.prompt.toolorder import ToolOrder
from start_llm.prompt.turns import Record, Shown, Told
from start_llm.prompt.volatile import Field

NOTE_OPEN = "<update-note>"
NOTE_CLOSE = "</update-note>"
_NOTE_INTRO = "Changed since first shown above; these are current:"
_DIFF_INTRO = "Changed above (diff):"
_MOVED_INTRO = "Newer than what is shown above; trust this instead (diff):"
_SHORT = 400


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


@dataclass(frozen=True, slots=True)
class _Slot:
    """A field of a request: its name through all requests, its value, and the line that tells it in a note."""

    name: str
    value: str
    line: str
    field: Field

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class _Seen:
    entry: Entry
    slots: tuple[_Slot, ...] = ()

    @property
    def whole(self) -> _Slot | None:
        """The block that moves, if the message is nothing else."""
        return next((slot for slot in self.slots if slot.kind == "moving" and not self.entry.facts.counts), None)


def _read(entries: Sequence[Entry]) -> list[_Seen]:
    """The entries with their fields' slots. A field belongs to its place in the chain; a block that moves does not."""
    moved: Counter[str] = Counter()
    position = 0
    seen = []
    for entry in entries:
        seen.append(_Seen(entry, tuple(_slots(entry.facts, position, moved))) if entry.facts.fields else _Seen(entry))
        position += entry.facts.counts
    return seen


def _slots(facts: Facts, position: int, moved: Counter[str]) -> list[_Slot]:
    """The fields of the message at chain `position`; `moved` counts the moving blocks before it."""
    result = []
    counts: dict[str, int] = {}
    for field in facts.fields:
        rule, value = field.rule, field.text.strip()
        if rule.kind in ("reminder", "transient"):
            result.append(_Slot(_reminder_slot(value), value, value, field))
        elif rule.kind == "moving":
            result.append(_Slot(f"moving:{rule.name}:{moved[rule.name]}", value, value, field))
            moved[rule.name] += 1
        else:
            number = counts.get(rule.name, 0)
            counts[rule.name] = number + 1
            result.append(_Slot(f"{rule.kind}:{position}:{rule.name}:{number}", value, field.line, field))
    return result


def _told(slots: Sequence[_Slot]) -> tuple[Told, ...]:
    told = [(slot.name, slot.value) for slot in slots]
    return (*told, *((_patched(slot.name), "0") for slot in slots if slot.kind == "moving"))


def _patched(slot: str) -> str:
    """The slot that counts the characters of changes told since a block was shown whole."""
    return f"patched:{slot}"


def _definition(tool: Tool) -> str:
    return json.dumps(tool.as_function(), ensure_ascii=False, sort_keys=True)


def as_sent(entries: Sequence[Entry], tools: Sequence[Tool], *, telemetry: bool) -> View:
    """The client's messages; without telemetry if `telemetry` is False."""
    return View(tuple(_shown_from(_read(entries), telemetry)), tuple(tools), strict=telemetry)


def _shown_from(seen: Sequence[_Seen], telemetry: bool = False) -> list[Shown]:
    result = []
    for item in seen:
        entry, facts = item.entry, item.entry.facts
        message = entry.message if telemetry else facts.shown
        if not (facts.shown is not entry.message and not message.content.strip() and not facts.counts):
            result.append(Shown(message, entry.link, _told(item.slots), facts.transient, facts.digest))
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
    seen = _read(entries)
    known, rest = seen[:matched], seen[matched:]
    full = depth == len(base.chain)
    after = _after(base, depth)
    while after and rest and _stays(rest[0], after[0], _fold(old)):
        old.append(after.pop(0))
        known.append(rest.pop(0))
    while after and _moves(rest, after[0], _fold(old)):
        old.append(after.pop(0))
        if after and after[0].message.role == "assistant":
            old.append(after.pop(0))
    if full:
        old += [shown for shown in after if not shown.transient]
    spoke = continues or any(shown.message.role == "assistant" for shown in old)
    told = _fold(old)
    changes = [*_date_change(dates, told), *_field_changes(known, told)]
    rest = _settled(rest, told, old, changes)
    changes += _gone(seen, known, told)
    if spoke and (base.tools or not tools):
        head = base.tools
        changes += _tool_changes(tools, head, told)
    else:
        # Nothing was said with other tools yet, or the head does not say how to call any.
        head = order.arrange(tools, base.tools)
    new = _shown_from(rest)
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


def _stays(seen: _Seen, shown: Shown, told: dict[str, str]) -> bool:
    """A message that does not count stands where it was shown, word for word or as a block whose changes are told."""
    if seen.entry.facts.counts:
        return False
    if seen.entry.facts.shown == shown.message:
        return True
    block, was = seen.whole, dict(shown.told)
    return block is not None and bool(was.get(block.name)) and bool(_patch(block, told | was))


def _moves(rest: Sequence[_Seen], shown: Shown, told: dict[str, str]) -> bool:
    """A block at the end of what is known comes later in the request, the same or with changes that can be told."""
    was = dict(shown.told)
    slots = [slot for item in rest for slot in item.slots if slot.kind == "moving" and was.get(slot.name)]
    return bool(slots) and all(was[slot.name] == slot.value or _patch(slot, told | was) for slot in slots)


def _patch(slot: _Slot, told: dict[str, str]) -> list[_Change]:
    """What changed in a block since it was told, as lines; nothing where telling the whole block is better."""
    old, size = told.get(slot.name), len(slot.value)
    if not old or "\n" not in slot.value or slot.kind not in ("context", "moving"):
        return []
    text = text_changes(old, slot.value, 2 if slot.kind == "moving" else 0)
    if text is None or len(text) >= (0.9 * size if slot.kind == "moving" else size):
        return []
    # Changes to changes add up: a reader should not have to apply more of them than the block is long.
    spent = int(told.get(_patched(slot.name), "0")) + len(text)
    if spent >= size:
        return []
    return [_Change((slot.name, slot.value), text), _Change((_patched(slot.name), str(spent)), text)]


def _field_changes(known: Sequence[_Seen], told: dict[str, str]) -> list[_Change]:
    """What differs in messages that are shown as before; `told` is kept up to date."""
    changes: list[_Change] = []
    for slot in (slot for item in known for slot in item.slots):
        if told.get(slot.name) == slot.value:
            continue
        new = _patch(slot, told) or [_Change((slot.name, slot.value), slot.line)]
        if len(new) == 1 and told.get(_patched(slot.name), "0") != "0":
            new.append(_Change((_patched(slot.name), "0"), slot.line))
        told.update(change.told for change in new)
        changes += new
    return changes


def _settled(rest: Sequence[_Seen], told: dict[str, str], old: Sequence[Shown], changes: list[_Change]) -> list[_Seen]:
    """New messages without the moving blocks that the model knows; what changed in those is added to `changes`."""
    head = [shown.message.content for shown in old if shown.message.role == "system"]
    result: list[_Seen] = []
    dropped = False
    for item in rest:
        entry = item.entry
        if dropped and entry.message.role == "assistant" and not entry.facts.counts:
            dropped = False
            continue
        if item is rest[-1] and not entry.facts.counts:
            # What the model is to answer is shown, whatever it is.
            result.append(item)
            break
        content, settled = entry.facts.shown.content, 0
        for slot in item.slots:
            if slot.kind != "moving":
                continue
            was = told.get(slot.name)
            same = slot.value == was or (was is None and any(slot.value in text for text in head))
            patch = [] if same else _patch(slot, told)
            told.update(_told([slot]) if not patch else (change.told for change in patch))
            changes += patch
            if same or patch:
                settled += 1
                brief = len(slot.value) <= _SHORT and entry.message.role != "tool"
                mention = "" if brief else f"[As above: {name_of(slot.value)}]"
                content = content.replace(slot.field.text, mention, 1)
        dropped = not entry.facts.counts and 0 < settled == len(item.slots)
        if settled and not dropped:
            facts = replace(entry.facts, shown=replace(entry.facts.shown, content=content))
            item = replace(item, entry=replace(entry, facts=facts))
        if not dropped:
            result.append(item)
    return result


def _gone(seen: Sequence[_Seen], known: Sequence[_Seen], told: dict[str, str]) -> list[_Change]:
    """Blocks that the request does not have any more, though the part of it that they stood in is there."""
    present = {slot.name for item in seen for slot in item.slots}
    position = sum(item.entry.facts.counts for item in known)
    changes = []
    for slot, value in list(told.items()):
        kind, _, rest = slot.partition(":")
        left = kind == "moving" or (kind == "context" and int(rest.split(":")[0]) < position)
        if left and value and slot not in present:
            told[slot] = ""
            changes.append(_Change((slot, ""), f"No longer part of the conversation's context: {name_of(value)}"))
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
    diffs = [change.told[0] for change in changes if change.told[0].startswith("patched:") and change.told[1] != "0"]
    intro = _DIFF_INTRO if diffs else _NOTE_INTRO
    if any(slot.startswith(_patched("moving:")) for slot in diffs):
        intro = _MOVED_INTRO
    note = "\n".join([NOTE_OPEN, intro, *lines, NOTE_CLOSE])
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
