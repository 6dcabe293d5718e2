"""What `doctor` and its parts find."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """One line. `bad` keeps the server from working, `note` is worth knowing."""

    subject: str
    verdict: Verdict
    text: str
