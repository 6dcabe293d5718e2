"""What changed in a block of text, as the lines that are new and the lines that are gone."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_LINES = 3000
_AT_ONCE = 150
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
    """A file that a block shows between fences, under a line with its name. `text` is what stands between them.

    `under`: how many lines of the block's own words, blank ones left out, stand above it.
    """

    name: str
    text: str
    whole: str
    under: int


def split_files(text: str) -> tuple[str, dict[tuple[str, int], File]]:
    """A block's own words, and its files by name (and number, where two have the same name)."""
    lines = text.split("\n")
    prose: list[str] = []
    named = False
    files: dict[tuple[str, int], File] = {}
    seen: Counter[str] = Counter()
    open_ended: set[str] = set()
    index = under = 0
    while index < len(lines):
        opened = _FENCE.match(lines[index])
        end = None
        if opened and named and opened.group(1) not in open_ended:
            end = _closing(lines, index, opened.group(1))
            open_ended |= {opened.group(1)} if end is None else set()
        if opened is None or end is None:
            prose.append(lines[index])
            named = _is_name(lines[index])
            under += bool(lines[index].strip())
            index += 1
            continue
        name, named = prose.pop().strip(), False
        under -= 1
        whole = "\n".join(lines[index - 1 : end + 1])
        # Where the file does not end with a line break, its last line stands before the mark.
        last = lines[end].removesuffix(_closing_mark(opened.group(1)))
        files[name, seen[name]] = File(name, "\n".join([*lines[index + 1 : end], *([last] * bool(last))]), whole, under)
        seen[name] += 1
        # The empty line after a file comes and goes with it.
        index = end + 2 if lines[end + 1 : end + 2] == [""] else end + 1
    return "\n".join(prose), files


def _is_name(line: str) -> bool:
    """A sentence above a fence is not the name of a file."""
    return 1 <= len(line.split()) <= _WORDS_OF_A_PATH and line.rstrip()[-1] not in ".:!?"


def _closing(lines: Sequence[str], opened: int, mark: str) -> int | None:
    closing = _closing_mark(mark)
    return next((i for i in range(opened + 1, len(lines)) if lines[i].endswith(closing)), None)


def _closing_mark(opening: str) -> str:
    return opening.replace("<", "</") if opening.startswith("<") else opening


def _apart(old: tuple[str, dict[tuple[str, int], File]], new: tuple[str, dict[tuple[str, int], File]]) -> bool:
    """Files can be told apart from the words around them: each has its own name, and all stand at one place."""
    if any(number for _, files in (old, new) for _, number in files):
        return False
    above = set()
    for prose, files in (old, new):
        words = [line for line in prose.split("\n") if line.strip()]
        above |= {tuple(words[:under]) for under in {file.under for file in files.values()}}
    return len(above) <= 1


def changes(
    old: str, new: str, edited: Callable[[File | None, File], bool | None] = lambda old, new: None, name: str = ""
) -> str | None:
    """The lines by which `new` differs from `old`, under lines that say where.

    A place in a file is named by the file and the line in it, any other by the block's first line and the line in the
    block's own words, as they are numbered now; a line that is gone and stood there once may stand for the number. Of
    a run of lines that are gone the first is told, and how many. `edited` says whether the reader's own edits made the
    file what it is: then it is only named; if they would have made another one of it, that is said; None if there are
    none. `name` stands for the first line. None where the texts are too long to compare.
    """
    (before, had), (after, has) = split_files(old), split_files(new)
    if not _apart((before, had), (after, has)):
        before, had, after, has = old, {}, new, {}
    parts = [_hunks(before, after, name or name_of(new, _SHORT_NAME), prose=True)]
    if gone := [had[key].name for key in had if key not in has]:
        parts.append([f"Not there any more: {', '.join(gone)}"])
    for key, file in has.items():
        was = had.get(key)
        own = edited(was, file)
        if was is None or was.text != file.text or own is False:
            parts.append(_file_changes(was, file, own))
    told = [part for part in parts if part is not None]
    return "\n".join(line for part in told for line in part) if len(told) == len(parts) else None


def _file_changes(was: File | None, file: File, edited: bool | None) -> list[str] | None:
    if edited:
        return [f"{file.name}: as {'written' if was is None else 'edited'} above"]
    if was is None:
        return [f"New: {file.whole}"]
    if was.text == file.text:
        return [f"{file.name}: not edited, still as before"]
    hunks = _hunks(was.text, file.text, file.name if edited is None else f"{file.name}, without the edits above")
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
    for a1, a2, b1, b2 in _differences(a, b):
        gone, more = a[a1:a2], []
        if len(gone) >= _ELIDE and prose:
            gone = gone[next((i for i, line in enumerate(gone) if line.strip()), 0) :]
        if len(gone) >= _ELIDE:
            gone, more = gone[:1], [f"(-{len(gone) - 1} more lines)"]
        place = f"line {head + b1 + 1}" if not gone or before.count(gone[0]) > 1 else ""
        title = ", ".join(part for part in ("" if lines else name, place) if part)
        lines += [f"{title}:" if title else "@@", *(f"-{line}" for line in gone), *more]
        lines += (f"+{line}" for line in b[b1:b2])
    return lines


def _differences(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Where `a` and `b` differ: `a[a1:a2]` is `b[b1:b2]` now.

    Long texts are cut at lines that stand once in each, as SequenceMatcher may take the square of their length.
    """
    cuts = _unique_pairs(a, b) if max(len(a), len(b)) > _AT_ONCE else []
    left, right = 0, 0
    for i, j in [*cuts, (len(a), len(b))]:
        one, other = a[left:i], b[right:j]
        if max(len(one), len(other)) > _AT_ONCE:
            yield left, i, right, j
        elif one != other:
            for kind, a1, a2, b1, b2 in SequenceMatcher(None, one, other).get_opcodes():
                if kind != "equal":
                    yield left + a1, left + a2, right + b1, right + b2
        left, right = i + 1, j + 1


def _unique_pairs(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once in `a` and once in `b`: the longest row of them that is in order in both."""
    in_a, in_b = Counter(a), Counter(b)
    place = {line: j for j, line in enumerate(b) if in_b[line] == 1}
    pairs = [(i, place[line]) for i, line in enumerate(a) if in_a[line] == 1 and line in place]
    ends: list[int] = []
    tops: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(tops[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        tops[length : length + 1] = [index]
    row = []
    index = tops[-1] if tops else -1
    while index >= 0:
        row.append(pairs[index])
        index = before[index]
    return row[::-1]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items `a` and `b` begin with alike."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
