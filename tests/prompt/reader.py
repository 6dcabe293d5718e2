"""A careful reader of prompts: rebuilds what holds now from the text that a model is shown, and from nothing else.

It knows how the notes are written, but shares no code with what writes them. Prompts are those of the chatml and the
qwen35 template in `tests.prompt.models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FILES_INTRO = "I have *added these files to the chat* so you can go ahead and edit them."
SYSTEM_TEXT = "System text"

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n?(.*?)<\|im_end\|>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_NOTE = re.compile(r"(?:^|\n\n)<update>\n")
_TOOLS = "\n\n# Tools\n<tools>"
_FENCE = re.compile(r"`{3,4}")

_AS_EDITED = re.compile(r"(.+): as (?:edited|written) above")
_NOT_EDITED = re.compile(r"(.+): not edited, still as before")
_GONE = re.compile(r"Not there any more: (.+)")
_WHOLE = re.compile(r"(?:New|Now): (.+)")
_CHANGED = re.compile(r"(.+?)(, without the edits above)?(?:, line (\d+))?:")
_NEXT_PLACE = re.compile(r"line (\d+):|@@")
_MORE_GONE = re.compile(r"\(-(\d+) more lines\)")
_NO_FILES = "No longer part of the conversation's context: I have"
_EDIT = re.compile(r"([^\n]+)\n```\n<<<<<<< SEARCH\n(.*?)=======\n(.*?)\n>>>>>>> REPLACE\n```", re.DOTALL)

_TIME = re.compile(r"(current time is )\d+")
_NO_TOOL = re.compile(r"No longer available, do not call: (.*)")
_NEW_TOOL = re.compile(r"This tool (?:is now available too|has changed): (.*)")
_OTHER_TOOL = re.compile(r"The tool (\w+) has changed, now: (.*)")


class Unreadable(ValueError):
    """The prompt tells something that cannot be: a change of lines that are not there, a file without an end."""


# --- messages and notes -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A message as the prompt shows it: the client's own words, and the notes that were added to them, in order."""

    role: str
    content: str
    notes: tuple[str, ...] = ()


def messages_read(prompt: str) -> list[Read]:
    """All complete messages of a prompt; a tool result, which templates show as a user's words, as a `tool` message."""
    read = []
    for role, content in _MESSAGE.findall(prompt):
        result = _RESULT.search(content) if role == "user" else None
        own, *notes = _NOTE.split(result[1] if result else content)
        notes = [note.removesuffix("\n</update>") for note in notes]
        read.append(Read("tool" if result else role, own, tuple(notes)))
    return read


@dataclass(slots=True)
class Hunk:
    """One changed place. `line`: its number in the new text, from 1; None if the first line that is gone says where.

    `more`: how many lines behind those in `gone` are gone too.
    """

    line: int | None
    gone: list[str]
    more: int
    came: list[str]


def hunk_at(lines: Sequence[str], start: int, line: int | None) -> tuple[Hunk, int]:
    """The hunk whose changed lines begin at `start`, and where the note goes on."""
    hunk = Hunk(line, [], 0, [])
    index = start
    while index < len(lines):
        text = lines[index]
        if more := _MORE_GONE.fullmatch(text):
            hunk.more = int(more[1])
        elif text.startswith("-"):
            hunk.gone.append(text[1:])
        elif text.startswith("+"):
            hunk.came.append(text[1:])
        else:
            break
        index += 1
    return hunk, index


def hunks_at(lines: Sequence[str], start: int, line: int | None) -> tuple[list[Hunk], int]:
    """All hunks of one text: the first as told by the line before `start`, the others under their own lines."""
    first, index = hunk_at(lines, start, line)
    hunks = [first]
    while index < len(lines) and (place := _NEXT_PLACE.fullmatch(lines[index])):
        hunk, index = hunk_at(lines, index + 1, int(place[1]) if place[1] else None)
        hunks.append(hunk)
    return hunks, index


def patched(text: str, hunks: Iterable[Hunk]) -> str:
    """The text after all changes.

    Raises:
        Unreadable: lines that are said to be gone did not stand there.
    """
    rest, result = text.split("\n"), []
    for hunk in hunks:
        if hunk.line is None and (not hunk.gone or hunk.gone[0] not in rest):
            raise Unreadable(f"no place for {hunk} in {rest}")
        until = hunk.line - 1 - len(result) if hunk.line is not None else rest.index(hunk.gone[0])
        behind = until + len(hunk.gone) + hunk.more
        if not 0 <= until <= behind <= len(rest) or rest[until : until + len(hunk.gone)] != hunk.gone:
            raise Unreadable(f"{hunk} is not at line {until + 1} of {rest}")
        result += [*rest[:until], *hunk.came]
        rest = rest[behind:]
    return "\n".join([*result, *rest])


# --- files ------------------------------------------------------------------


def file_at(lines: Sequence[str], fence: int) -> tuple[str, int]:
    """The file that the fence at this line opens, without its last line break, and the line that ends it."""
    mark = lines[fence]
    end = next((i for i in range(fence + 1, len(lines)) if lines[i].endswith(mark)), None)
    if end is None:
        raise Unreadable(f"{mark} at line {fence + 1} is not closed: {lines}")
    # A file that does not end with a line break has its last line before the mark.
    last = lines[end].removesuffix(mark)
    return "\n".join([*lines[fence + 1 : end], *([last] if last else [])]), end


def files_in(block: str) -> dict[str, str]:
    """All files of a block, by the line above each of them."""
    lines = block.split("\n")
    files: dict[str, str] = {}
    index = 1
    while index < len(lines):
        if lines[index - 1] and _FENCE.fullmatch(lines[index]):
            name = lines[index - 1]
            files[name], index = file_at(lines, index)
        index += 1
    return files


def with_edits(files: Mapping[str, str], answers: Iterable[str]) -> dict[str, str]:
    """The files after the edits in a model's answers; an edit of lines that are not there does nothing.

    An edit of no lines adds lines at the end of a file, or makes one.
    """
    edited = dict(files)
    for answer in answers:
        for name, search, replace in _EDIT.findall(answer):
            if not search:
                edited[name] = f"{edited[name]}\n{replace}" if edited.get(name) else replace
            elif name in edited:
                edited[name] = replaced(edited[name], search.removesuffix("\n"), replace)
    return edited


def replaced(text: str, search: str, replace: str) -> str:
    """The text with the first run of lines that are `search` replaced."""
    lines, wanted = text.split("\n"), search.split("\n")
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return "\n".join([*lines[:start], replace, *lines[start + len(wanted) :]])
    return text


def after_note(note: str, told: Mapping[str, str], believed: Mapping[str, str]) -> dict[str, str]:
    """The files after a note. `told`: as the client told them last; `believed`: after the model's edits since.

    A file that only the model has written counts once the client says that it is there.
    """
    if _NO_FILES in note:
        return {}
    if FILES_INTRO in note:
        return files_in(note)
    files = {name: believed[name] for name in told}
    lines = note.split("\n")
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if (as_edited := _AS_EDITED.fullmatch(line)) and as_edited[1] in believed:
            files[as_edited[1]] = believed[as_edited[1]]
        elif (as_before := _NOT_EDITED.fullmatch(line)) and as_before[1] in told:
            files[as_before[1]] = told[as_before[1]]
        elif gone := _GONE.fullmatch(line):
            for name in gone[1].split(", "):
                files.pop(name, None)
        elif (whole := _WHOLE.fullmatch(line)) and index < len(lines) and _FENCE.fullmatch(lines[index]):
            files[whole[1]], end = file_at(lines, index)
            index = end + 1
        elif (changed := _CHANGED.fullmatch(line)) and changed[1] in told:
            name, undone, number = changed.groups()
            hunks, index = hunks_at(lines, index, int(number) if number else None)
            files[name] = patched((told if undone else believed)[name], hunks)
    return files


def files_read(prompt: str) -> dict[str, str]:
    """The files as they are at the end of a prompt, without line breaks at their ends."""
    told: dict[str, str] = {}
    answers: list[str] = []
    for message in messages_read(prompt):
        if message.role == "assistant":
            answers.append(message.content)
        elif message.role == "user":
            if message.content.startswith(FILES_INTRO):
                told, answers = files_in(message.content), []
            for note in message.notes:
                told, answers = after_note(note, told, with_edits(told, answers)), []
    believed = with_edits(told, answers)
    return {name: believed[name].rstrip("\n") for name in told}


# --- system text and tools --------------------------------------------------


def lasting(text: str) -> str:
    """A text with its volatile values as changes show them."""
    return _TIME.sub(r"\1...", text)


def system_read(prompt: str) -> str:
    """The system text as it is at the end of a prompt, without its volatile values."""
    first, *_ = messages = messages_read(prompt)
    if first.role != "system":
        raise Unreadable(f"no system text, but {first}")
    text = lasting(first.content.partition(_TOOLS)[0])
    for note in (note for message in messages for note in message.notes):
        lines = note.split("\n")
        for index, line in enumerate(lines):
            changed = _CHANGED.fullmatch(line)
            if changed and changed[1] == SYSTEM_TEXT:
                hunks, _ = hunks_at(lines, index + 1, int(changed[3]) if changed[3] else None)
                text = patched(text, hunks)
                break
    return text


def tools_read(prompt: str) -> dict[str, str]:
    """The descriptions of the tools that may be called at the end of a prompt, by name."""
    messages = messages_read(prompt)
    shown = messages[0].content.partition(_TOOLS)[2]
    listed = (json.loads(line)["function"] for line in shown.split("\n") if line.startswith("{"))
    tools = {tool["name"]: tool["description"] for tool in listed}
    for line in "\n".join(note for message in messages for note in message.notes).split("\n"):
        if gone := _NO_TOOL.fullmatch(line):
            for name in gone[1].split(", "):
                tools.pop(name, None)
        elif new := _NEW_TOOL.fullmatch(line):
            function = json.loads(new[1])["function"]
            tools[function["name"]] = function["description"]
        elif other := _OTHER_TOOL.fullmatch(line):
            tools[other[1]] = json.loads(other[2]).get("description", tools[other[1]])
    return tools
