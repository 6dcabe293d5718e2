"""The command `audit`: asks the table of requests."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from start_llm.core.errors import WrongWords
from start_llm.core.settings import Settings
from start_llm.dashboard.audit import AUDIT_FILE, AuditEntry, Sum, Wanted, entries, sums
from start_llm.dashboard.tables import print_table
from start_llm.host.home import home

UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
Row = Sequence[str]


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Prints requests, oldest first, or sums of them. Raises WrongWords, FileUnavailable."""
    wanted = Wanted(moment(options.since, time.time()), options.client, options.of_model, options.outcome)
    path, by = home() / settings.cache_dir / AUDIT_FILE, options.by
    found = sums(path, wanted, by) if by else entries(path, wanted, max(options.lines, 0))
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    elif found:
        print_table(SUM_HEADINGS if by else ENTRY_HEADINGS, map(row, found), words=_WORDS)
    else:
        off = " AUDIT_DAYS=0: nothing is written." if not settings.audit_days else ""
        print(f"No request is known since then (--since {options.since}).{off}")
    return 0


def moment(age: str, now: float) -> float:
    """Unix seconds of an age like ``12h``; 0 for ``all``. Raises WrongWords."""
    if age == "all":
        return 0.0
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([mhdw])", age)
    if found is None:
        raise WrongWords(f"--since {age}: allowed are ages like 30m, 12h, 7d, 2w, and all")
    return now - float(found[1]) * UNITS[found[2]]


_FIGURES = ("PROMPT", "REUSED", "NEW", "COMPUTED", "ANSWER", "FIRST", "ALL")
ENTRY_HEADINGS = ("TIME", "ID", "CLIENT", "MODEL", *_FIGURES, "END")
SUM_HEADINGS = ("", "REQUESTS", "ANSWERED", *_FIGURES)
_WORDS = {"", "TIME", "ID", "CLIENT", "MODEL", "END"}


def row(entry: AuditEntry | Sum) -> Row:
    """Ids are shortened as the terminal shows them, which ``/v1/cache/requests/{id}`` takes. Sums have mean seconds."""
    if isinstance(entry, Sum):
        return entry.name or "-", f"{entry.requests:,}", f"{entry.answered:,}", *figures(entry)
    how = entry.outcome if entry.status < 400 else f"{entry.outcome} ({entry.status})"
    return (
        datetime.fromtimestamp(entry.time).strftime("%m-%d %H:%M:%S"),
        entry.id[-6:],
        entry.client,
        entry.model,
        *figures(entry),
        f"{how}; {entry.miss}" if entry.miss else how,
    )


def figures(counted: AuditEntry | Sum) -> Row:
    share = f"{counted.reused / counted.prompt:.0%}" if counted.prompt else "-"
    tokens = (f"{counted.new:,}", f"{counted.computed:,}", f"{counted.answer:,}")
    return f"{counted.prompt:,}", share, *tokens, _seconds(counted.seconds_first), _seconds(counted.seconds)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
