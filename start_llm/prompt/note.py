"""Update notes: how the model is told that something it was shown does not hold any more."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from start_llm.prompt.match import DATE, Change, MatchQuery
from start_llm.prompt.reading import Slot
from start_llm.prompt.textdiff import TAG, changed, diff, withdraws
from start_llm.prompt.tree import Difference, Path, nonce_after

NOTE_OPEN = "<update-"
NOTE_CLOSE = "</update>"
_CLOSES = NOTE_CLOSE[:-1]
_INTRO = "newer than above"
_SHORT = 400  # characters; a longer value is told by its changed lines, if those are under a quarter of it
_SHARE = 4
_BRIEF = 100  # characters that name a text which is gone
_ROLE_GONE = "The system text at the top no longer holds"
_ROLE = f"{_ROLE_GONE}. You are now what this new system text says"
_TOP_AGAIN = "The system text at the top holds again"
_INSTEAD_GONE = "What was told in its place no longer holds."
_NO_CALLS = "No tool can be called now: answer with text."
_ALL_CALLS = "All tools described at the top can be called again."
# Words in a system text that some templates look for: they turn thinking on and off, or leave out the text.
_DIRECTIVE = re.compile(r"/(?:no_)?think\b|/system_override|detailed thinking o(?:n|ff)|<\|?think")


class Note(NamedTuple):
    """An update note.

    lines: its tags included. is_role: the system text is another one than was told last, not only some of its lines.
    replaces: nothing that the head says of it holds any more.
    """

    lines: tuple[str, ...]
    is_role: bool
    replaces: bool


def note_of(changes: Sequence[Change], path: Path, query: MatchQuery) -> Note | None:
    """What tells them; None if a change is better shown where the client put it.

    Its first tag alone has the nonce, which costs tokens: none of its lines may look like its last one.
    """
    kinds = _by_kind(changes)
    told = [told_of(change) for change in kinds["system"]]
    if any(map(_withdraws, kinds["system"], told)):
        return None
    is_role = None in told
    again = _as_at_top(path, query) if told else None
    if again is not None and (is_role or _length(again) < sum(map(_length, told))):
        told = [again]
    replaces = None in told
    if replaces:
        told = [_role(path, query)]
    told += _of_blocks(kinds[""])
    lines = [line for part in told if part is not None for line in part]
    lines += _tools(kinds["tool"], path, query)
    if None in told or any(_CLOSES in line.lower() for line in lines):
        return None
    opening = f"{NOTE_OPEN}{nonce_after(path, query.request.session)} {_INTRO}>"
    return Note((opening, *lines, NOTE_CLOSE), is_role, replaces)


def _by_kind(changes: Sequence[Change]) -> dict[str, list[Change]]:
    """Those of system texts, of tools, and all others under an empty name."""
    kinds: dict[str, list[Change]] = {"system": [], "tool": [], "": []}
    for change in changes:
        kinds[change.slot.rule if change.slot.rule in kinds else ""].append(change)
    return kinds


def _withdraws(change: Change, told: list[str] | None) -> bool:
    return bool(change.new) and withdraws(change.old or "", change.new or "", is_whole=told is None)


def _role(path: Path, query: MatchQuery) -> list[str] | None:
    """How another system text is told: whole. None for one that speaks to the template, which reads no note."""
    if any(_DIRECTIVE.search(text) for text in (*path.systems, *query.systems)):
        return None
    return [f"{_ROLE}:", *query.systems] if any(query.systems) else [f"{_ROLE_GONE}."]


def _as_at_top(path: Path, query: MatchQuery) -> list[str] | None:
    """The system text as the one in the prompt's head, with the lines that differ; None if it is another one, or if the
    head is what was told last."""
    if len(path.systems) != len(query.systems):
        return None
    pairs = [(Slot("system", n), *pair) for n, pair in enumerate(zip(path.systems, query.systems, strict=True))]
    if all(path.told.get(slot) == top for slot, top, _ in pairs):
        return None
    parts = [told_of(Change(slot, top, now)) for slot, top, now in pairs if now != top]
    if None in parts or any(withdraws(top, now) for _, top, now in pairs):
        return None
    but = ", but for what follows" if parts else ""
    return [f"{_TOP_AGAIN}{but}. {_INSTEAD_GONE}", *(line for part in parts for line in part or ())]


def _length(lines: Sequence[str] | None) -> int:
    return sum(len(line) + 1 for line in lines or ())


def _of_blocks(changes: Sequence[Change]) -> list[list[str] | None]:
    """How declared places of messages are told; those with the same change (a block in each message) at once."""
    alike: dict[Change, list[int]] = {}
    for change in changes:
        alike.setdefault(replace(change, slot=Slot(change.slot.rule, min(change.slot.place, 0))), []).append(
            change.slot.place
        )
    return [told_of(change, places) for change, places in alike.items()]


def told_of(change: Change, places: Sequence[int] = ()) -> list[str] | None:
    """How a value is told; None if it is better shown where the client put it, or is another system text.

    `places`: of the messages that it stands in.
    """
    slot, old, new = change.slot, change.old, change.new
    if slot == DATE:
        return [f"Current date: {new}"]
    # Another system text is another task: it is told by its lines where few are new, or where only a time in it is.
    other = slot.rule == "system" and change.difference > Difference.TIMES
    title = _title(slot, places)
    if new is None:
        if other:
            return None
        gone = "withdrawn" if change.earlier is None else f"withdrawn there, message {change.earlier + 1} still has it"
        gone = "not there any more, newer messages count" if change.repeated else gone
        return [f"{title}, {gone}: {_brief(old or '')}"]
    if old is None:
        return [f"{title}, new:", new]
    lines = diff(old, new)
    long = other or max(len(old), len(new)) > _SHORT
    if long and (lines is None or sum(map(len, lines)) * _SHARE > len(new)):
        return None
    return [f"{title}, {lines[0]}", *lines[1:]] if lines else [f"{title}, now:", new]


def _brief(text: str) -> str:
    """The beginning of a text in one line, without tags of their own."""
    lines = (line.strip() for line in text.split("\n"))
    words = " ".join(line for line in lines if line and not TAG.match(line))
    return words if len(words) <= _BRIEF else words[:_BRIEF].rsplit(" ", 1)[0] + " ..."


def _title(slot: Slot, places: Sequence[int]) -> str:
    if slot.rule == "system":
        return "System text" if not slot.place else f"System text {slot.place + 1}"
    name = slot.rule.replace("_", " ").removesuffix(" behind").removesuffix(" before")
    if slot.place < 0:
        return name
    numbers = ", ".join(str(place + 1) for place in sorted(set(places)))
    return f"{name} in message{'s' if ',' in numbers else ''} {numbers}"


def _tools(changes: Sequence[Change], path: Path, query: MatchQuery) -> list[str]:
    if changes and not query.definitions:
        return [_NO_CALLS]
    if changes and query.definitions == path.definitions:
        return [_ALL_CALLS]
    gone = [change.slot.name for change in changes if change.new is None]
    again = [change.slot.name for change in changes if change.new is not None and change.new == change.at_top]
    lines = [f"No longer available, do not call: {', '.join(gone)}"] if gone else []
    lines += [f"Available again, as described at the top: {', '.join(again)}"] if again else []
    return lines + [
        _tool(change.slot.name, change.old, change.new) for change in changes if change.new not in (None, change.at_top)
    ]


def _tool(name: str, old: str | None, new: str | None) -> str:
    """How a tool is told: of description and parameters only what is not as before."""
    assert new is not None
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
