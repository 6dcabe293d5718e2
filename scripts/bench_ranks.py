"""What it costs that all ranks confirm each step, measured with two ranks on this machine.

    python3.12 install_and_run.py run scripts/bench_ranks.py --tokens 3000

One request decodes without drafts, a token a step. Rank 0 waits for the confirmations for `BLOCK` steps, then it does
not wait for as many, and so on. The model is tiny: a step takes hardly longer than what surrounds it, so the part of
the time is the largest that there can be. It does not measure real models or networks: there a confirmation costs the
way there and back once more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.app import App
from start_llm.core.settings import Settings
from start_llm.engine.ranks import leader
from tests.engine.ranks.checkpoints import write_checkpoint

BLOCK = 50  # steps
EOS = 1  # of the checkpoint


class MeasuredGroup(leader.LeaderGroup):
    """Confirms the steps of every second block only. Model thread.

    Attributes:
        steps: seconds of each step, by whether it was confirmed.
        waits: seconds of these that rank 0 waited for the confirmation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.waits: list[float] = []
        self._number = 0
        self._skipped = 0
        self._ended_at = 0.0

    def confirm(self, digest: int) -> None:
        if not self._group:  # the ranks are meeting
            super().confirm(digest)
            return
        self._number += 1
        block, place = divmod(self._number, BLOCK)
        is_confirmed, began = block % 2 == 0, time.perf_counter()
        if is_confirmed:
            while self._skipped:
                self._done[1].get()
                self._skipped -= 1
            super().confirm(digest)
        else:
            self._skipped += 1
        now = time.perf_counter()
        if place:  # the first one of a block makes up for what was skipped
            self.steps[is_confirmed].append(now - self._ended_at)
            if is_confirmed:
                self.waits.append(now - began)
        self._ended_at = now


def measure(tokens: int, home: Path) -> MeasuredGroup:
    made: list[MeasuredGroup] = []

    def make(*args: Any) -> MeasuredGroup:
        made.append(MeasuredGroup(*args))
        return made[0]

    settings = Settings.model_validate(
        {"start_llm_cache_dir": home, "log_root": home / "logs", "proxy": "off", "mlx_port": 0, "audit_days": 0}
        | {"model_path": str(write_checkpoint(home / "plain", "plain")), "hosts": "127.0.0.1,127.0.0.1"}
        | {"drafts": "off", "enable_request_logging": False}
    )
    with patch.object(leader, "LeaderGroup", make):
        app = App(settings, say=lambda line: print(line, file=sys.stderr))
        app.start()
    try:
        asked = {"prompt": "hello", "max_tokens": tokens, "temperature": 0.0, "logit_bias": {str(EOS): -100.0}}
        httpx.post(f"{app.url}/v1/completions", json=asked, timeout=600).raise_for_status()
    finally:
        app.stop()
    return made[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000)
    options = parser.parse_args()
    mx.set_default_device(mx.Device(mx.cpu))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.tokens, Path(folder))
    for name, seconds in (
        ("step, confirmed", found.steps[True]),
        ("step, not confirmed", found.steps[False]),
        ("waiting for the confirmation", found.waits),
    ):
        low, middle, high = (1000 * each for each in statistics.quantiles(seconds, n=4))
        print(f"{name}: {middle:.2f} ms (quartiles {low:.2f} and {high:.2f}, {len(seconds)} steps)")


if __name__ == "__main__":
    main()
