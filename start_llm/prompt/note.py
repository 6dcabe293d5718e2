"""Update notes: how the model is told that something it was shown does not hold any more."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from start_llm.prompt.match import DATE, Change, MatchQuery
from start_llm.prompt.reading import Slot
from start_llm.prompt.textdiff import TAG, changed, diff
from start_llm.prompt.tree import Difference, Path, nonce_after

NOTE_OPEN = "<update-"
NOTE_CLOSE = "</update>"
_CLOSES = NOTE_CLOSE[:-1]
_INTRO = "newer than above"
_SHORT = 400  # characters; a longer value is told by its changed lines, if those are under a quarter of it
_SHARE = 4
_BRIEF = 100  # characters that name a text which is gone
_ROLE_GONE = "The system text at the top no longer holds"
_ROLE = f"{_ROLE_GONE}. These instructions hold now"
_TOP_AGAIN = "The system text at the top holds again. Instructions that were told in its place no longer hold."
_NO_CALLS = "No tool can be called now: answer with text."
_ALL_CALLS = "All tools described at the top can be called again."
# Words in a system text that some templates look for: they turn thinking on and off, or leave out the text.
_DIRECTIVE = re.compile(r"/(?:no_)?think\b|/system_override|detailed thinking o(?:n|ff)|<\|?think")


class Note(NamedTuple):
    """An update note. `lines`: its tags included. `is_role`: it tells the whole system text anew."""

    lines: tuple[str, ...]
    is_role: bool


def note_of(changes: Sequence[Change], path: Path, query: MatchQuery) -> Note | None:
    """What tells them; None if a change is better shown where the client put it.

    Its first tag alone has the nonce, which costs tokens: none of its lines may look like its last one.
    """
    kinds: dict[str, list[Change]] = {"system": [], "tool": [], "": []}
    for change in changes:
        kinds[change.slot.rule if change.slot.rule in kinds else ""].append(change)
    told = [told_of(change) for change in kinds["system"]]
    is_role = None in told
    if is_role:
        told = [_role(path, query)]
    told += [told_of(change) for change in kinds[""]]
    lines = [line for part in told if part is not None for line in part]
    lines += _tools(kinds["tool"], path, query)
    if None in told or any(_CLOSES in line.lower() for line in lines):
        return None
    opening = f"{NOTE_OPEN}{nonce_after(path, query.request.session)} {_INTRO}>"
    return Note((opening, *lines, NOTE_CLOSE), is_role)


def _role(path: Path, query: MatchQuery) -> list[str] | None:
    """How another system text is told: whole. None for one that speaks to the template, which reads no note."""
    if any(_DIRECTIVE.search(text) for text in (*path.systems, *query.systems)):
        return None
    if query.systems == path.systems:
        return [_TOP_AGAIN]
    return [f"{_ROLE}:", *query.systems] if any(query.systems) else [f"{_ROLE_GONE}."]


def told_of(change: Change) -> list[str] | None:
    """How a value is told; None if it is better shown where the client put it, or is another system text."""
    slot, old, new = change.slot, change.old, change.new
    if slot == DATE:
        return [f"Current date: {new}"]
    # Another system text is another task: it is told by its lines where few are new, or where only a time in it is.
    other = slot.rule == "system" and change.difference > Difference.TIMES
    title = _title(slot)
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


def _title(slot: Slot) -> str:
    if slot.rule == "system":
        return "System text" if not slot.place else f"System text {slot.place + 1}"
    name = slot.rule.replace("_", " ").removesuffix(" behind").removesuffix(" before")
    return name if slot.place < 0 else f"{name} in message {slot.place + 1}"


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
