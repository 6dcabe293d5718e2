"""What changed in a text, as the lines that are new and the lines that are gone."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby

MAX_LINES = 3000
_AT_ONCE = 150
_ELIDE = 13  # lines that are gone: so many are instructions, of which only the first and the last are told
_LONG = (5, 300)  # or of so many, if they have so many characters
_NAME = 100  # characters; a longer line before a fence is no file's name
_ALIKE = 6  # characters, as in "Mode: "
_SAME = "(as before)"
GONE = "no longer valid"
MOVED = "now only elsewhere"  # of lines that the new text has in another place: they hold
_NAMES = 24  # characters that stand around what is left out of a line
_WORTH = 40  # a shorter part is not left out; so much names a line
_WORD = re.compile(r"\s*\S+|\s+$")
# "- Region: eu-1", "export A=b", "| api | 80 |": a name, and a value behind it; "4b825dc fix: a" is a commit
_NAMED = re.compile(
    r"(?!\s*+[0-9a-f]{7,40}\s)\s*+(?:(?:[-*+>|#]+|\d+[.)]|export)\s++)*+"
    r"(?:(?<=export\s)|(?=[^:=|]*?\w\w))[^:=|]{1,60}(?::(?=\s)|[=|])(?=.*\w)"
)
_UNGIVEN = "(not given any more)"
_HEAD = re.compile(r"\s*+(?:<[\w-]+>\s*+$|#{1,6}\s)")  # of a block: "<git-status>", "# Environment"
_MOST_WORDS = 50
_MOST_WITHIN = 32  # lines of a text; comparing words takes the square of their number
_FENCE = re.compile(r"^`{3,}[\w.+-]*$|^<(?:source|code|pre|codeblock|sourcecode)>$")
_CLOSING = re.compile(r"`{3,}$|</(?:source|code|pre|codeblock|sourcecode)>$")
TAG = re.compile(r"^</?[\w-]+>$")
# three words, or so many signs of a script without spaces, and a full stop; possessive, as what is tried again takes
# the cube of a line's length
_SENTENCE = re.compile(
    r"(?=\W*+(?:\w++\W++){2}\w|.*?[\u3040-\u30ff\u3400-\u9fff]{6})"
    r".*[.!?…。！？](?:[\"'`)*_\]”’」』）】]|</[\w-]++>)*+\s*+$"
)


def diff(old: str, new: str) -> list[str] | None:
    """The lines by which `new` differs from `old`, each place under a line that says where it is in `new` now.

    Of lines that begin as before only the new ones are told. None where the texts are too long to compare.
    """
    before, after = old.split("\n"), new.split("\n")
    hunks = _hunks(before, after)
    if hunks is None:
        return None
    lines: list[str] = []
    places, still = _places(after), _still(after)
    ordered = cache(lambda: sorted(before))  # most changes need neither
    names = cache(lambda: {named[0] for line in after if (named := _NAMED.match(line))})
    for at, gone, came in hunks:
        place = places[at]
        if len(gone) == len(came) and all(map(_begin_alike, gone, came)):
            pairs = zip(gone, came, strict=True)
            is_short = len(lines) < _MOST_WITHIN
            lines += [f"{place}, now:", *_plus(changed(*pair, within=is_short) for pair in pairs)]
            continue
        runs = list(_by_whether_moved(gone, still, as_block=not came))
        for is_moved, run in runs:
            if is_moved:
                lines.append(f"{place}, {MOVED}:")
            elif came:  # what is new stands below
                lines.append(f"{place}:")
            else:
                lines.append(f"{place}, {GONE}:")
                run = run if _is_file(place) else _without_values(run, names())
            lines += _minus(run, ordered())
        if came and (not runs or runs[-1][0]):  # else both are told under the last heading
            lines.append(f"{place}:")
        lines += _plus(came)
    return lines


def _is_file(place: str) -> bool:
    return not place.startswith("line ")


def _without_values(gone: Iterable[str], names: Set[str]) -> list[str]:
    """Lines that are gone, without a value whose name no line has now: a model repeats what it read last."""
    found = [(line, _NAMED.match(line)) for line in gone]
    return [f"{name[0].rstrip()} {_UNGIVEN}" if name and name[0] not in names else line for line, name in found]


def _plus(lines: Iterable[str]) -> list[str]:
    return [f"+{line}" for line in lines]


def withdraws(old: str, new: str, *, is_whole: bool = False) -> bool:
    """Whether a sentence of `old`, a value with its name, or a block is gone and nothing came in its place: a model
    reads it where it stands, whatever a note says. So many lines at once are another mode's instructions.

    `is_whole`: the note tells all of `new`, so what came at a place stands for all that is gone there.
    """
    before, after = old.split("\n"), new.split("\n")
    still, hunks = _still(after), _hunks(before, after) or []
    if sum(max(len(gone), len(came)) for _, gone, came in hunks) >= _ELIDE:
        return False
    places = _places(after)
    for at, gone, came in hunks:
        instead = sum(re.search(r"\w", line) is not None for line in came)
        if instead and is_whole:
            continue
        runs = _by_whether_moved(gone, still, as_block=not instead)
        lines = (line for is_moved, run in runs if not is_moved for line in run)
        if sum(_says(line, is_code=_is_file(places[at])) for line in lines) > instead:
            return True
    return False


def _says(line: str, *, is_code: bool) -> bool:
    return bool(_SENTENCE.match(line) or (not is_code and (_NAMED.match(line) or _HEAD.match(line))))


def _hunks(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, Sequence[str], Sequence[str]]] | None:
    """Each place where lines differ: which line of `after` it is, the lines that are gone, and those that came.

    None where the texts are too long to compare.
    """
    head, tail = _ends(before, after)
    a, b = before[head : len(before) - tail], after[head : len(after) - tail]
    if max(len(a), len(b)) > MAX_LINES:
        return None
    return [(head + b1, a[a1:a2], b[b1:b2]) for a1, a2, b1, b2 in _differences(a, b)]


def _still(after: Sequence[str]) -> set[str]:
    """Lines that stand in the new text, and say enough to be known again."""
    return {line for line in after if len(line.strip()) >= _ALIKE}


def _by_whether_moved(gone: Sequence[str], still: Set[str], *, as_block: bool) -> Iterator[tuple[bool, Sequence[str]]]:
    """Runs of lines, and whether they stand in the new text; short lines say too little to be told apart.

    `as_block`: short lines among those that stand there are taken to have moved with them.
    """
    moved = all(line in still or len(line.strip()) < _ALIKE for line in gone) and not still.isdisjoint(gone)
    if moved and as_block:
        yield True, gone
        return
    for is_moved, run in groupby(gone, still.__contains__):
        yield is_moved, list(run)


def _minus(gone: Sequence[str], ordered: Sequence[str]) -> list[str]:
    """How lines that are gone are told; of many the first and the last. `ordered`: all lines of the old text."""
    if len(gone) < _ELIDE and (len(gone) < _LONG[0] or sum(map(len, gone)) <= _LONG[1]):
        return [f"-{_name(line, ordered)}" for line in gone]
    first, last = (f"-{_name(line, ordered)}" for line in (gone[0], gone[-1]))
    return [first, f"(-{len(gone) - 2} more lines, down to)", last]


def _begin_alike(old: str, new: str) -> bool:
    """A reader sees which line the new one stands for."""
    old = old.strip()
    length = max(_ALIKE, min(len(old) // 4, _WORTH))
    return len(old) >= length and new.lstrip().startswith(old[:length])


def changed(old: str, new: str, *, within: bool = False) -> str:
    """The new line; where a long part of it is as in the old one, that is left out, and a mark stands there.

    Such parts are looked for at both ends, and `within` the rest of a line of few words.
    """
    if _SAME in old or _SAME in new or len(new) < _WORTH:
        return new
    was, now = _WORD.findall(old), _WORD.findall(new)
    head, tail = _ends(was, now)
    rest, came = was[head : len(was) - tail], now[head : len(now) - tail]
    text = "".join(came)
    if within and max(len(rest), len(came)) <= _MOST_WORDS:
        blocks = SequenceMatcher(None, rest, came).get_opcodes()
        parts = [(kind == "equal", "".join(came[b1:b2])) for kind, _, _, b1, b2 in blocks]
        text = "".join(_shortened(part) if equal else part for equal, part in parts)
    start, end = "".join(now[:head]), "".join(now[len(now) - tail :])
    return _shortened(start) + text + _shortened(end, last=True)


def _shortened(text: str, *, last: bool = False) -> str:
    """A part that is as it was: some words at its ends, so that a reader finds it; of the line's end the first ones."""
    left = text.find(" ", _NAMES) + 1
    right = len(text) if last else text.rfind(" ", 0, len(text) - _NAMES)
    if not left or right - left < _WORTH:
        return text
    return f"{text[:left]}{_SAME}{text[right:]}"


def _name(line: str, ordered: Sequence[str]) -> str:
    """The beginning of a long line, if no other line begins so. `ordered`: all lines, this one included."""
    name = line[: line.rfind(" ", 0, _WORTH)] if len(line) > _WORTH + _NAMES else ""
    following = bisect_left(ordered, name) + 1
    if not name.strip() or (following < len(ordered) and ordered[following].startswith(name)):
        return line
    return f"{name} ..."


def _places(lines: Sequence[str]) -> list[str]:
    """How a reader finds each line, and the end: in the file that it stands in, or in the whole text."""
    places: list[str] = []
    opened: int | None = None
    for number, line in enumerate((*lines, "")):
        name = lines[opened - 1].strip().removesuffix(":") if opened else ""
        in_file = opened is not None and 0 < len(name) <= _NAME
        places.append(f"{name}, line {number - (opened or 0)}" if in_file else f"line {number + 1}")
        if opened is None:
            opened = number if _FENCE.match(line) else None
        elif _CLOSING.search(line):
            opened = None
    return places


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
    """Places of lines that stand once in `a` and once in `b`: the longest row of them that is in order in both.

    SequenceMatcher would take the square of their number where neighbours have changed places.
    """
    in_a, in_b = Counter(a), Counter(b)
    place = {line: j for j, line in enumerate(b) if in_b[line] == 1}
    pairs = [(i, place[line]) for i, line in enumerate(a) if in_a[line] == 1 and line in place]
    ends: list[int] = []  # of the rows of each length, the one that ends first
    tops: list[int] = []  # its last pair
    before: list[int] = []  # the pair before each in its row
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


def _ends(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """How many items `a` and `b` begin with alike, and how many of the others they end with alike."""
    head = common_prefix(a, b)
    return head, common_prefix(a[head:][::-1], b[head:][::-1])


def common_prefix(a: Sequence[object], b: Sequence[object], chunk: int = 65536) -> int:
    """How many items two sequences of one type begin with alike."""
    limit = min(len(a), len(b))
    low = 0
    while low < limit and a[low : low + chunk] == b[low : low + chunk]:
        low += chunk
    low, high = min(low, limit), min(low + chunk, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
