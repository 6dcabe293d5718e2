"""What the model is shown: under ``append`` the same bytes as before, and one note that says what differs now."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.core.messages import Message, Tool
from start_llm.prompt.canonical import Facts
from start_llm.prompt.clock import SLOT, date_line
from start_llm.prompt.notes import Change, Patcher, Slot, head_changes, patched, told_by, with_note
from start_llm.prompt.textdiff import name_of
from start_llm.prompt.toolorder import ToolOrder
from start_llm.prompt.turns import Record, Shown

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


def _reminder_slot(text: str) -> str:
    return "reminder:" + hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class _Seen:
    entry: Entry
    slots: tuple[Slot, ...] = ()

    @property
    def whole(self) -> Slot | None:
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


def _slots(facts: Facts, position: int, moved: Counter[str]) -> list[Slot]:
    """The fields of the message at chain `position`; `moved` counts the moving blocks before it."""
    result = []
    counts: dict[str, int] = {}
    for field in facts.fields:
        rule, value = field.rule, field.text.strip()
        if rule.kind in ("reminder", "transient"):
            result.append(Slot(_reminder_slot(value), value, value, field))
        elif rule.kind == "moving":
            result.append(Slot(f"moving:{rule.name}:{moved[rule.name]}", value, value, field))
            moved[rule.name] += 1
        else:
            number = counts.get(rule.name, 0)
            counts[rule.name] = number + 1
            result.append(Slot(f"{rule.kind}:{position}:{rule.name}:{number}", value, field.line, field))
    return result


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
            result.append(Shown(message, entry.link, told_by(item.slots), facts.transient, facts.digest))
    return result


def append_only(
    entries: Sequence[Entry],
    tools: Sequence[Tool],
    base: Record,
    depth: int,
    order: ToolOrder,
    *,
    continues: bool,
    text_of: Callable[[Message], str],
    dates: tuple[str, str] = ("", ""),
) -> View:
    """Shows the first `depth` messages that count as `base` showed them, and the rest as the client sent them.

    `continues`: the next message is what the model answered there. `text_of`: a message's text without volatile values.
    `dates`: the one that the template prints in this conversation, and the present one.
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
    later = [item.entry.message.content for item in rest if item.entry.link and item.entry.message.role == "assistant"]
    while after and rest and _stays(rest[0], after[0], Patcher([*old, after[0]], later)):
        old.append(after.pop(0))
        known.append(rest.pop(0))
    while after and _moves(rest, after[0], Patcher([*old, after[0]], later)):
        old.append(after.pop(0))
        if after and after[0].message.role == "assistant":
            old.append(after.pop(0))
    if full:
        old += [shown for shown in after if not shown.transient]
    spoke = continues or any(shown.message.role == "assistant" for shown in old)
    told = _fold(old)
    patcher = Patcher(tuple(old), later)
    changes = [*_date_change(dates, told), *(changed_head(entries, base, depth, text_of) or ())]
    told.update(change.told for change in changes)
    _forget_values(told, changes)
    changes += _field_changes(known, told, patcher)
    rest = _settled(rest, told, patcher, changes)
    changes += _gone(seen, known, told)
    if spoke and (base.tools or not tools):
        head = base.tools
        changes += _tool_changes(tools, head, told)
    else:
        # Nothing was said with other tools yet, or the head does not say how to call any.
        head = order.arrange(tools, base.tools)
    new = _shown_from(rest)
    if not any(change.line for change in changes):
        return View((*old, *new), tuple(head), (), len(old))
    shown = [*old, *new]
    place, lines = with_note(shown, changes)
    return View(tuple(shown), tuple(head), lines, min(len(old), place))


def changed_head(
    entries: Sequence[Entry], base: Record, depth: int, text_of: Callable[[Message], str]
) -> list[Change] | None:
    """What differs in the system messages at the front from what `base` showed and told; see `head_changes`."""
    old = _old_shown(base, depth)
    front = [shown for shown in old if shown.link is not None][: min(base.head, depth)]
    new = [(entry.message, entry.facts.digest) for entry in entries if entry.link is not None][: len(front)]
    return head_changes(front, new, _fold(old), text_of)


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


def _date_change(dates: tuple[str, str], told: dict[str, str]) -> list[Change]:
    printed, present = dates
    if told.get(SLOT, printed) == present:
        return []
    told[SLOT] = present
    return [Change((SLOT, present), date_line(present))]


def _forget_values(told: dict[str, str], changes: Sequence[Change]) -> None:
    """A changed system text is told without the values of its clocks and names, so they are told again."""
    for change in changes:
        kind, _, position = change.told[0].partition(":")
        prefixes = (f"clock:{position}:", f"identity:{position}:")
        for slot in [slot for slot in told if kind == "text" and slot.startswith(prefixes)]:
            del told[slot]


def _stays(seen: _Seen, shown: Shown, patcher: Patcher) -> bool:
    """A message that does not count stands where it was shown, word for word or as a block whose changes are told."""
    if seen.entry.facts.counts:
        return False
    if seen.entry.facts.shown == shown.message:
        return True
    block, was = seen.whole, dict(shown.told)
    return block is not None and bool(was.get(block.name)) and bool(patcher.patch(block, _fold(patcher.shown)))


def _moves(rest: Sequence[_Seen], shown: Shown, patcher: Patcher) -> bool:
    """A block at the end of what is known comes later in the request, the same or with changes that can be told."""
    was, told = dict(shown.told), _fold(patcher.shown)
    slots = [slot for item in rest for slot in item.slots if slot.kind == "moving" and was.get(slot.name)]
    return bool(slots) and all(patcher.patch(slot, told) for slot in slots)


def _field_changes(known: Sequence[_Seen], told: dict[str, str], patcher: Patcher) -> list[Change]:
    """What differs in messages that are shown as before; `told` is kept up to date."""
    changes: list[Change] = []
    for slot in (slot for item in known for slot in item.slots):
        if told.get(slot.name) == slot.value:
            continue
        new = patcher.patch(slot, told) or [Change((slot.name, slot.value), slot.line)]
        if len(new) == 1 and told.get(patched(slot.name), "0") != "0":
            new.append(Change((patched(slot.name), "0"), slot.line))
        told.update(change.told for change in new)
        changes += new
    return changes


def _settled(rest: Sequence[_Seen], told: dict[str, str], patcher: Patcher, changes: list[Change]) -> list[_Seen]:
    """New messages without the moving blocks that the model knows; what changed in those is added to `changes`."""
    head = [shown.message.content for shown in patcher.shown if shown.message.role == "system"]
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
            in_head = any(slot.value in text for text in head)
            same = was is None and in_head
            patch = [] if same else patcher.patch(slot, told)
            told.update(told_by([slot]) if not patch else (change.told for change in patch))
            changes += patch
            if same or patch:
                settled += 1
                # What the system text says holds anyway; a tool's answer does not become empty.
                brief = (in_head or len(slot.value) <= _SHORT) and entry.message.role != "tool"
                mention = "" if brief else f"[As above: {name_of(slot.value)}]"
                content = content.replace(slot.field.text, mention, 1).rstrip("\n")
        dropped = not entry.facts.counts and 0 < settled == len(item.slots)
        if settled and not dropped:
            facts = replace(entry.facts, shown=replace(entry.facts.shown, content=content))
            item = replace(item, entry=replace(entry, facts=facts))
        if not dropped:
            result.append(item)
    return result


def _gone(seen: Sequence[_Seen], known: Sequence[_Seen], told: dict[str, str]) -> list[Change]:
    """Blocks that the request does not have any more, though the part of it that they stood in is there."""
    present = {slot.name for item in seen for slot in item.slots}
    position = sum(item.entry.facts.counts for item in known)
    changes = []
    for slot, value in list(told.items()):
        kind, _, rest = slot.partition(":")
        left = kind == "moving" or (kind == "context" and int(rest.split(":")[0]) < position)
        if left and value and slot not in present:
            told[slot] = ""
            changes.append(Change((slot, ""), f"No longer part of the conversation's context: {name_of(value)}"))
    return changes


def _tool_line(name: str, old: str, new: str) -> str:
    """How a tool is told that is new or has changed: of description and parameters only what is not as before."""
    if not old:
        return f"This tool is now available too: {new}"
    before, after = json.loads(old)["function"], json.loads(new)["function"]
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if before.keys() <= after.keys() and len(changed) < len(after):
        return f"The tool {name} has changed, now: {json.dumps(changed, ensure_ascii=False, sort_keys=True)}"
    return f"This tool has changed: {new}"


def _tool_changes(tools: Sequence[Tool], head: Sequence[Tool], told: dict[str, str]) -> list[Change]:
    """What the model must be told about its tools; `head` are those in the prompt's head."""
    known = {tool.name: _definition(tool) for tool in head}
    known.update({slot[5:]: value for slot, value in told.items() if slot.startswith("tool:")})
    now = {tool.name: _definition(tool) for tool in tools}
    changes = []
    for name, definition in now.items():
        if known.get(name) != definition:
            changes.append(Change((f"tool:{name}", definition), _tool_line(name, known.get(name, ""), definition)))
    gone = [name for name, definition in known.items() if definition and name not in now]
    line = f"No longer available, do not call: {', '.join(gone)}"
    return changes + [Change((f"tool:{name}", ""), line) for name in gone]
