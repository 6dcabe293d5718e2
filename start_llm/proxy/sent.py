"""What was sent to FALLBACK_MODEL: a file that LiteLLM's process writes and the server reads."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from start_llm.files.atomic import write_atomic

RECORD = "fallbacks.json"


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent to FALLBACK_MODEL."""

    counts: Mapping[str, int] = field(default_factory=dict)  # by the reason
    failed: int = 0  # of them, those that were not answered there either
    # `reason`, `ok`, `time`: of the last one; time in unix seconds, 0.0 where there is none
    reason: str = ""
    ok: bool = True
    time: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def after(self, earlier: Sent) -> Sent:
        """With what an earlier proxy had sent."""
        last = self if self.time else earlier
        counts = dict(Counter(self.counts) + Counter(earlier.counts))
        return Sent(counts, self.failed + earlier.failed, last.reason, last.ok, last.time)

    def figures(self) -> dict[str, float]:
        """For ``/metrics`` and the page."""
        by_reason = {f"fallbacks_{reason}": float(count) for reason, count in self.counts.items()}
        return {"fallbacks": float(self.total), "fallbacks_failed": float(self.failed), **by_reason}

    def sentence(self, model: str) -> str:
        """The last one, for the log."""
        at = datetime.fromtimestamp(self.time).strftime("%H:%M:%S")
        end = "" if self.ok else "; it was not answered there either, and the client got this server's own error"
        return f"a request was sent to FALLBACK_MODEL={model} at {at}, since: {self.reason} ({self.total} so far){end}"


def read_sent(folder: Path | None) -> Sent:
    """What the proxy of this `folder` has sent since its start."""
    if folder is None:
        return Sent()
    try:
        return Sent(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Sent()


@dataclass(slots=True)
class SentRecord:
    """The file, written anew with each request that was sent."""

    path: Path
    sent: Sent = field(default_factory=Sent)

    def add(self, reason: str, *, ok: bool) -> None:
        self.sent = Sent({reason: 1}, int(not ok), reason, ok, time.time()).after(self.sent)
        text = json.dumps(asdict(self.sent))
        try:
            write_atomic(self.path, text)
        except OSError as error:  # a full disk; LiteLLM's log has it, and the client its answer
            print(f"FALLBACK_MODEL: {text} cannot be written: {error}", flush=True)
