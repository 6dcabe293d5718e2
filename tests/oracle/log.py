"""What the oracle's log (`ORACLE_LOG`) says was computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoggedPass:
    """One forward pass: unix time, and for each row the tokens, the offset, and whether it was a decode step."""

    t: float
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    decode: tuple[bool, ...]

    @property
    def computed(self) -> int:
        return sum(n for n, decode in zip(self.tokens, self.decode, strict=True) if not decode)

    @property
    def decoded(self) -> int:
        return sum(n for n, decode in zip(self.tokens, self.decode, strict=True) if decode)


def mark(log: Path) -> int:
    """The log's length in bytes now; passes after it are read with ``since=mark``."""
    return log.stat().st_size if log.exists() else 0


def passes(log: Path, since: int = 0, until: int | None = None) -> Iterator[LoggedPass]:
    """Whole lines between two marks."""
    if not log.exists():
        return
    with log.open("rb") as file:
        file.seek(since)
        data = file.read() if until is None else file.read(until - since)
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        entry = json.loads(line)
        yield LoggedPass(entry["t"], tuple(entry["tokens"]), tuple(entry["offsets"]), tuple(entry["decode"]))


def prompt_work(log: Path, prompt: int, since: int = 0) -> int:
    """What one request computed of its prompt of so many tokens, where no other one ran beside it.

    Unlike `work_done` it goes by places. An answer that is computed again as a part of a prompt looks like a block of
    drafts to the oracle.
    """
    found = ((n, offset) for p in passes(log, since) for n, offset in zip(p.tokens, p.offsets, strict=True))
    return sum(max(0, min(offset + n, prompt) - offset) for n, offset in found)


def work_done(log: Path, since: int = 0, until: int | None = None) -> int:
    """Prompt tokens that went through the model; answer tokens fed back are not counted."""
    return sum(p.computed for p in passes(log, since, until))
