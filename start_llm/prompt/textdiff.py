"""What changed in a block of text, as the lines that are new and the lines that are gone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_LINES = 3000
_NAME = 60
_SHORT_NAME = 24
_ELIDE = 3
_WORDS_OF_A_PATH = 4
_SENTENCE = re.compile(r"^.{8,60}?[.:](?=\s|$)")
_TAG = re.compile(r"^<[/\w-]+>$")
_FENCE = re.compile(r"^(`{3,}|<(?:source|code|pre|codeblock|sourcecode)>)[\w.+-]*$")


def name_of(text: str, limit: int = _NAME) -> str:
    """The beginning of a block's first line, by which a reader finds it."""
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not _TAG.match(line)), "")
    if sentence := _SENTENCE.match(first):
        first = sentence.group()[:-1]
    return first if len(first) <= limit else first[:limit].rsplit(" ", 1)[0].rstrip(" ,.;:")


@dataclass(frozen=True, slots=True)
class File:
    """A file that a block shows between fences, under a line with its name. `text` is what stands between them."""

    name: str
    text: str
    whole: str


def split_files(text: str) -> tuple[str, dict[tuple[str, int], File]]:
    """A block's own words, and its files by name (and number, where two have the same name)."""
    lines = text.split("\n")
    prose: list[str] = []
    files: dict[tuple[str, int], File] = {}
    seen: Counter[str] = Counter()
    index = 0
    while index < len(lines):
        opened = _FENCE.match(lines[index])
        end = _closing(lines, index, opened.group(1)) if opened and index and _is_name(lines[index - 1]) else None
        if end is None:
            prose.append(lines[index])
            index += 1
            continue
        name = prose.pop().strip()
        whole = "\n".join(lines[index - 1 : end + 1])
        files[name, seen[name]] = File(name, "\n".join(lines[index + 1 : end]), whole)
        seen[name] += 1
        # The empty line after a file comes and goes with it.
        index = end + 2 if lines[end + 1 : end + 2] == [""] else end + 1
    return "\n".join(prose), files


def _is_name(line: str) -> bool:
    """A sentence above a fence is not the name of a file."""
    return 1 <= len(line.split()) <= _WORDS_OF_A_PATH and line.rstrip()[-1] not in ".:!?"


def _closing(lines: Sequence[str], opened: int, mark: str) -> int | None:
    closing = mark.replace("<", "</") if mark.startswith("<") else mark
    return next((i for i in range(opened + 1, len(lines)) if lines[i].endswith(closing)), None)


def changes(
    old: str, new: str, edited: Callable[[File | None, File], bool] = lambda old, new: False, name: str = ""
) -> str | None:
    """The lines by which `new` differs from `old`, under lines that say where.

    A place in a file is named by the file and the line in it, any other by the block's first line and the line in the
    block's own words, as they are numbered now; a line that is gone and stood there once may stand for the number. Of
    a run of lines that are gone the first is told, and how many. A file that `edited` knows is only named: the reader
    made that change, or wrote that file. `name` stands for the first line. None where the texts are too long to
    compare.
    """
    (before, had), (after, has) = split_files(old), split_files(new)
    parts = [_hunks(before, after, name or name_of(new, _SHORT_NAME), prose=True)]
    if gone := [had[key].name for key in had if key not in has]:
        parts.append([f"Not there any more: {', '.join(gone)}"])
    for key, file in has.items():
        was = had.get(key)
        if was is None or was.text != file.text:
            parts.append(_file_changes(was, file, edited(was, file)))
    told = [part for part in parts if part is not None]
    return "\n".join(line for part in told for line in part) if len(told) == len(parts) else None


def _file_changes(was: File | None, file: File, edited: bool) -> list[str] | None:
    if edited:
        return [f"{file.name}: as {'written' if was is None else 'edited'} above"]
    if was is None:
        return [f"New: {file.whole}"]
    hunks = _hunks(was.text, file.text, file.name)
    return hunks if hunks is None or len("\n".join(hunks)) < len(file.whole) else [f"Now: {file.whole}"]


def _hunks(old: str, new: str, name: str, *, prose: bool = False) -> list[str] | None:
    """The changed places of a text that is called `name`; in `prose` blank lines that are gone say nothing."""
    before, after = old.split("\n"), new.split("\n")
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    a, b = before[head : len(before) - tail], after[head : len(after) - tail]
    if max(len(a), len(b)) > MAX_LINES:
        return None
    lines: list[str] = []
    for kind, a1, a2, b1, b2 in SequenceMatcher(None, a, b).get_opcodes():
        if kind == "equal":
            continue
        gone, more = a[a1:a2], []
        if len(gone) >= _ELIDE:
            first = next((line for line in gone if line.strip()), gone[0]) if prose else gone[0]
            gone, more = [first], [f"(-{len(gone) - 1} more lines)"]
        place = f"line {head + b1 + 1}" if not gone or before.count(gone[0]) > 1 else ""
        title = ", ".join(part for part in ("" if lines else name, place) if part)
        lines += [f"{title}:" if title else "@@", *(f"-{line}" for line in gone), *more]
        lines += (f"+{line}" for line in b[b1:b2])
    return lines


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items `a` and `b` begin with alike."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
