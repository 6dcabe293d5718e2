"""Update notes: how the model is told that something it was shown does not hold any more."""

from __future__ import annotations

import json
from collections.abc import Sequence

from start_llm.prompt.match import DATE, Change
from start_llm.prompt.reading import Slot
from start_llm.prompt.textdiff import TAG, changed, diff
from start_llm.prompt.tree import Difference

NOTE_OPEN = "<update-"
NOTE_CLOSE = "</update>"
_CLOSES = NOTE_CLOSE[:-1]
_INTRO = "newer than above"
_SHORT = 400  # characters; a longer value is told by its changed lines, if those are under a quarter of it
_SHARE = 4
_BRIEF = 100  # characters that name a text which is gone


def note_of(changes: Sequence[Change], nonce: str) -> tuple[str, ...] | None:
    """The note's lines; None if a change is better shown where the client put it.

    Its first tag alone has the nonce, which costs tokens: none of its lines may look like its last one.
    """
    lines: list[str] = []
    for change in changes:
        told = _told(change)
        if told is None:
            return None
        lines += told
    if any(_CLOSES in line.lower() for line in lines):
        return None
    return (f"{NOTE_OPEN}{nonce} {_INTRO}>", *lines, NOTE_CLOSE)


def _told(change: Change) -> list[str] | None:
    slot, old, new = change.slot, change.old, change.new
    if slot == DATE:
        return [f"Current date: {new}"]
    if slot.rule == "tool":
        return [_tool(slot.name, old, new)]
    title = _title(slot)
    if new is None:
        gone = "withdrawn" if change.earlier is None else f"withdrawn there, message {change.earlier + 1} still has it"
        gone = "not there any more, newer messages count" if change.repeated else gone
        return [f"{title}, {gone}: {_brief(old or '')}"]
    if old is None:
        return [f"{title}, new:", new]
    lines = diff(old, new)
    # Another system text is another task: it is told where little of it is new, or where only a time in it is.
    other = slot.rule == "system" and change.difference > Difference.TIMES
    long = other or max(len(old), len(new)) > _SHORT
    if long and (lines is None or sum(map(len, lines)) * _SHARE > len(new)):
        return None
    return [f"{title}, {lines[0]}", *lines[1:]] if lines else [f"{title}, now:", new]


def _brief(text: str) -> str:
    """The beginning of a text in one line, without tags of their own."""
    lines = (line.strip() for line in text.split("\n"))
    words = " ".join(line for line in lines if line and not TAG.match(line))
    return words if len(words) <= _BRIEF else words[:_BRIEF].rsplit(" ", 1)[0] + " ..."


def _title(slot: Slot) -> str:
    if slot.rule == "system":
        return "System text" if not slot.place else f"System text {slot.place + 1}"
    name = slot.rule.replace("_", " ").removesuffix(" behind").removesuffix(" before")
    return name if slot.place < 0 else f"{name} in message {slot.place + 1}"


def _tool(name: str, old: str | None, new: str | None) -> str:
    """How a tool is told: of description and parameters only what is not as before."""
    if new is None:
        return f"Tool {name}: no longer available, do not call it"
    if old is None:
        return f"Tool {name}: now available: {_json(_function(new))}"
    before, after = _function(old), _function(new)
    differ = [key for key in after if key not in before or _json(before[key]) != _json(after[key])]
    was, now = (_json({key: each[key] for key in differ if key in each}) for each in (before, after))
    return f"Tool {name}: changed, now: {changed(was, now)}"


def _function(definition: str) -> dict[str, object]:
    """What a definition says of its function, but for the name."""
    function = json.loads(definition)["function"]
    return {key: value for key, value in function.items() if key != "name"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
