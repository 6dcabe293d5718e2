"""Date and time expressions, in the forms that clients write into system texts: a closed grammar.

A line that differs from an earlier one in nothing else tells the same as before, at another moment. English names and
digits only; a month or a zone counts only beside a day or a time, since both are names of people and places, too.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Sequence

_NAMES = "January February March April May June July August September October November December"
_MONTHS = re.findall(r"\w+", _NAMES)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ZONES = "UTC|GMT|CET|CEST|EET|EEST|WEST|MSK|BST|IST|JST|KST|SGT|HKT|[ACEMP][SD]T|A[KE][SD]T|AW[SD]T|NZ[SD]T|HST"
_AREAS = "Africa|America|Antarctica|Arctic|Asia|Atlantic|Australia|Europe|Indian|Pacific|Etc"


def _names(words: Sequence[str], *more: str) -> str:
    """Full names, abbreviations (with a dot or without), and both in capitals."""
    forms = [form for word in words for form in (word, word.upper(), f"{word[:3]}\\.?", f"{word[:3].upper()}\\.?")]
    return "|".join(sorted((*forms, *more), key=len, reverse=True))


_MONTH = f"(?:{_names(_MONTHS, 'Sept[.]?')})"
_DAY = f"(?:{_names(_DAYS)})"
_GAP = "[ \u00a0\u202f]"
_CLOCK = r"(?P<hour{0}>\d{{1,2}}):(?P<minute{0}>[0-5]\d)(?::[0-5]\d(?:[.,]\d{{1,9}})?)?"
_OFFSET = r"[+-](?:0\d|1[0-4]):?(?:[0-5]\d)?"
_SHORT_ZONE = rf"{_GAP}?(?:Z\b|(?:{_ZONES})(?:{_OFFSET}|[+-]\d{{1,2}})?|{_OFFSET})"
_ZONE = rf"(?:{_SHORT_ZONE}|{_GAP}(?:{_AREAS})(?:/[A-Z][A-Za-z_+-]+){{1,2}})"
_LONG_ZONE = rf"(?:{_GAP}\((?:[A-Z][A-Za-z]+ )*[A-Z][A-Za-z]+(?:[+-]\d{{1,2}}|(?:/[A-Z][A-Za-z_]+)+)?\))"
_HALF = rf"(?P<half{{0}}>{_GAP}?[AaPp]\.?[Mm]\.?)"
_NUMBER = r"(?P<{0}>\d{{1,2}})(?:st|nd|rd|th)?"
_YEAR = r"(?P<{0}>(?:19|20)\d\d)"

_FORMS = {
    "date": (
        r"(?P<y1>(?:19|20)\d\d)(?P<sep>[-/])(?P<m1>\d\d)(?P=sep)(?P<d1>\d\d)",
        r"(?P<y2>(?:19|20)\d\d)年(?P<m2>\d{1,2})月(?P<d2>\d{1,2})日",
        r"(?P<m3>\d{1,2})/(?P<d3>\d{1,2})/(?P<y3>(?:19|20)\d\d)",
        r"(?P<d4>\d{1,2})\.(?P<m4>\d{1,2})\.(?P<y4>(?:19|20)\d\d)",
        rf"(?:{_DAY},?{_GAP})?(?P<name5>{_MONTH}){_GAP}{_NUMBER.format('d5')}(?:,?{_GAP}{_YEAR.format('y5')})?",
        rf"(?:{_DAY},?{_GAP})?{_NUMBER.format('d6')}\.?{_GAP}(?:of )?(?P<name6>{_MONTH})"
        rf"(?:,?{_GAP}{_YEAR.format('y6')})?",
        rf"(?P<name7>{_MONTH}){_GAP}{_YEAR.format('y7')}",
    ),
    "time": (
        rf"{_CLOCK.format(1)}(?:{_HALF.format(1)})?{_ZONE}?{_LONG_ZONE}?",
        rf"(?P<hour2>\d{{1,2}}){_HALF.format(2)}",
    ),
    "weekday": ("|".join(_DAYS), "星期[一二三四五六日天]"),
}
_MOMENT = rf"(?P<joined>(?<=\d)T(?P<hour3>[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d{{1,9}})?)?(?:Z|{_OFFSET})?)"
# No part of a longer word, number, path, version or name.
_LETTER = r"A-Za-z0-9_\u00c0-\u024f"
_ALONE = rf"(?<![{_LETTER}.:/+$@#-])(?:{{}})(?![{_LETTER}/]|[-.:+][{_LETTER}])"
_EXPRESSION = re.compile(
    _ALONE.format(
        "|".join(
            rf"(?P<{kind}>(?:{'|'.join(forms)}){f'(?:{_MOMENT})?' if kind == 'date' else ''})"
            for kind, forms in _FORMS.items()
        )
    )
)


def _is_real(match: re.Match[str]) -> bool:
    """Whether there is such a day and such a time."""
    found = {name: value for name, value in match.groupdict().items() if value is not None}
    for number in "123":
        low, high = (1, 12) if f"half{number}" in found else (0, 23)
        if not low <= int(found.get(f"hour{number}", low)) <= high:
            return False
    for number in "1234567":
        if f"d{number}" not in found:
            continue
        day, year = int(found[f"d{number}"]), int(found.get(f"y{number}", 2000))
        name = found.get(f"name{number}")
        month = _month(name) if name else int(found[f"m{number}"])
        either_way = number == "3" and _is_day(year, day, month)
        if not (_is_day(year, month, day) or either_way):
            return False
    return True


def _month(name: str) -> int:
    return next(n for n, month in enumerate(_MONTHS, 1) if month.lower().startswith(name[:3].lower()))


def _is_day(year: int, month: int, day: int) -> bool:
    return 1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]


def without_times(line: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands between the expressions of a line, and the kind of each: ``date``, ``time`` or ``weekday``."""
    texts: list[str] = []
    kinds: list[str] = []
    at = 0
    for match in _EXPRESSION.finditer(line):
        if _is_real(match):
            texts.append(line[at : match.start()])
            kinds.append(next(kind for kind in _FORMS if match[kind] is not None))
            at = match.end()
    return (*texts, line[at:]), tuple(kinds)


def differ_in_times_only(old: str, new: str) -> bool:
    """Whether two texts are the same, line by line, but for what dates and times say."""
    before, after = old.split("\n"), new.split("\n")
    return len(before) == len(after) and all(
        one == other or without_times(one) == without_times(other) for one, other in zip(before, after, strict=True)
    )
