"""Says from the session logs why tokens were computed twice.

    python3.12 install_and_run.py run scripts/diff_turns.py        # the newest day's sessions
    python3.12 install_and_run.py run scripts/diff_turns.py logs/2026-11-21/session-abc.jsonl --all

Prints a line per request (prompt, reused, computed, new), and below each one that computed more than was new: where its
prompt left what was stored, in which message and field, by which rule or eviction, what would help, and both texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def entries(file: Path) -> Iterator[Json]:
    """Log entries that have cache figures; a line that was cut off by a crash is passed over."""
    for line in file.read_text("utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and "computed" in entry:
            yield entry


def explain(entry: Json) -> list[str]:
    """Lines that say why `entry` computed more than was new; none if it did not or nothing is known."""
    miss = entry.get("miss")
    if not miss:
        return []
    where = [f"token {miss.get('token')}"]
    where += [f"message {miss['message']}"] if miss.get("message") is not None else []
    where += [str(miss["field"])] if miss.get("field") else []
    where += [f"rule {miss['rule']}"] if miss.get("rule") else []
    lines = [f"    {miss.get('reason', 'unknown')} at {', '.join(where)}. {miss.get('detail', '')}".rstrip()]
    if miss.get("remedy"):
        lines.append(f"      remedy: {miss['remedy']}")
    if miss.get("expected") or miss.get("found"):
        lines += [f"      stored: {miss.get('expected')!r}", f"      now:    {miss.get('found')!r}"]
    return lines


def describe(file: Path, everything: bool) -> list[str]:
    """The report on one session's log."""
    lines = [str(file)]
    for number, entry in enumerate(entries(file), 1):
        reasons = explain(entry)
        twice = entry["computed"] - entry.get("new", 0)
        if not everything and not reasons and twice <= 0:
            continue
        figures = " ".join(f"{key}={entry.get(key, '-')}" for key in ("prompt", "reused", "computed", "new"))
        lines.append(f"  {number:4d} {entry.get('id', '?')} {figures} twice={max(0, twice)}")
        lines += reasons
    return lines if len(lines) > 1 else [*lines, "  nothing was computed twice"]


def newest(root: Path) -> list[Path]:
    """The session logs of the newest day under `root`."""
    days = sorted(day for day in root.glob("*-*-*") if day.is_dir())
    return sorted(days[-1].glob("session-*.jsonl")) if days else []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="session logs; the newest day's if none is given")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of the logs (LOG_ROOT)")
    parser.add_argument("--all", action="store_true", help="also requests that computed only what was new")
    options = parser.parse_args(argv)
    files = options.files or newest(options.logs)
    if not files:
        print(f"no session logs under {options.logs}", file=sys.stderr)
        return 1
    for file in files:
        print("\n".join(describe(file, options.all)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
