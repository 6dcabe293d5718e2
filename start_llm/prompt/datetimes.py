"""Date and time expressions, in the forms that clients write into system texts: a closed grammar.

A line that differs from an earlier one in nothing else tells the same as before, at another moment. English names and
digits only; a month or a zone counts only beside a day or a time, since both are names of people and places, too.
"""

from __future__ import annotations

import re
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
_OFFSET = r"[+-](?:0\d|1[0-4]):?(?:[0-5]\d)?"
_SHORT_ZONE = rf"{_GAP}?(?:Z\b|(?:{_ZONES})(?:{_OFFSET}|[+-]\d{{1,2}})?|{_OFFSET})"
_ZONE = rf"(?:{_SHORT_ZONE}|{_GAP}(?:{_AREAS})(?:/[A-Z][A-Za-z_+-]+){{1,2}})"
_LONG_ZONE = rf"(?:{_GAP}\((?:[A-Z][A-Za-z]+ )*[A-Z][A-Za-z]+(?:[+-]\d{{1,2}}|(?:/[A-Z][A-Za-z_]+)+)?\))"
_HALF = rf"{_GAP}?[AaPp]\.?[Mm]\.?"
_SECONDS = r"(?::[0-5]\d(?:[.,]\d{1,9})?)?"
_YEAR, _M, _D = r"(?:19|20)\d\d", "(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_NTH = f"{_D}(?:st|nd|rd|th)?"

_FORMS = {
    "date": (
        rf"{_YEAR}(?P<sep>[-/])(?=\d\d\D){_M}(?P=sep)(?=\d\d){_D}",
        rf"{_YEAR}年{_M}月{_D}日",
        rf"(?:{_M}/{_D}|{_D}/{_M})/{_YEAR}",
        rf"{_D}\.{_M}\.{_YEAR}",
        rf"(?:{_DAY},?{_GAP})?{_MONTH}{_GAP}{_NTH}(?:,?{_GAP}{_YEAR})?",
        rf"(?:{_DAY},?{_GAP})?{_NTH}\.?{_GAP}(?:of )?{_MONTH}(?:,?{_GAP}{_YEAR})?",
        rf"{_MONTH}{_GAP}{_YEAR}",
    ),
    "time": (
        rf"{_M}(?::[0-5]\d{_SECONDS})?{_HALF}{_ZONE}?{_LONG_ZONE}?",
        rf"(?:[01]?\d|2[0-3]):[0-5]\d{_SECONDS}(?!{_HALF}){_ZONE}?{_LONG_ZONE}?",
    ),
    "weekday": ("|".join(_DAYS), "星期[一二三四五六日天]"),
}
_MOMENT = rf"(?P<joined>(?<=\d)T(?:[01]\d|2[0-3]):[0-5]\d{_SECONDS}(?:Z|{_OFFSET})?)"
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


def without_times(line: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands between the expressions of a line, and the kind of each: ``date``, ``time`` or ``weekday``."""
    texts: list[str] = []
    kinds: list[str] = []
    at = 0
    for match in _EXPRESSION.finditer(line):
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
