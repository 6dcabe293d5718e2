"""How many arrays a large store's KV is in, and what the device's limit of buffers costs.

Metal has room for so many buffers, however small they are (`resource_limit` of MLX's device info: 499,000); stored KV
stays under 60% of that by eviction. Recorded sessions are replayed through the real store as in `bench_sessions`, with
and without that limit. A model of 64 layers is one layer of each kind here, with KV of a few bytes a token: all its
layers have equal numbers of arrays, so the limit is divided by how many of them there are.

usage: python3.12 install_and_run.py run scripts/bench_arrays.py PATH.. [--bytes N] [--limit N] [--at-once N..]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_sessions import Device, Request, Score, read_sessions, replay_ours, timeline

DEVICE = Device(prefill=600.0, disk=3e9, token_bytes=65536)


@dataclass(frozen=True)
class Kind:
    """A model of 64 layers: those that hold a row for each token, and the others.

    Attributes:
        grows: layers with a row for each token, of two arrays.
        token_bytes: of these rows.
        state_tokens: a checkpoint of the other layers takes as much as the rows of so many tokens.
    """

    name: str
    grows: int
    token_bytes: int
    state_tokens: int = 0

    @property
    def state_arrays(self) -> int:
        """Of a checkpoint, for each layer that grows: two for each other layer."""
        return max(2 * (64 - self.grows) // self.grows, 1)

    def replayed(self, requests: Sequence[Request], budget: int, limit: int) -> Score:
        """`budget`: tokens. `limit`: arrays; 0: none."""
        arrays = self.state_arrays, limit // self.grows
        return replay_ours(requests, budget, DEVICE, self.state_tokens, None, arrays=arrays)[0]


KINDS = (
    Kind("attention only", 64, 64 * 4096),
    Kind("recurrent, as a 27B hybrid", 16, 16 * 4096, 2304),
    Kind("recurrent, small states", 16, 16 * 4096, 256),
    Kind("windows of 128", 32, 32 * 2048, 128),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument("--bytes", type=float, default=400e9, help="of stored KV")
    parser.add_argument("--limit", type=int, default=499_000 * 60 // 100, help="arrays")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 24], help="sessions at once")
    parser.add_argument("--longest", type=int, default=200_000, help="leave out sessions with longer prompts")
    parser.add_argument("--kinds", type=int, nargs="+", default=range(len(KINDS)), help="by their place in the list")
    options = parser.parse_args()
    sessions = [one for one in read_sessions(options.paths) if one.longest <= options.longest]
    for at_once in options.at_once:
        requests = timeline(sessions, at_once)
        table = Table(
            "model", "tokens", "arrays, no limit", "arrays", "computed / optimum, no limit", "with it", "worse"
        )
        for kind in (KINDS[place] for place in options.kinds):
            budget = int(options.bytes / kind.token_bytes)
            free = bound = kind.replayed(requests, budget, 0)
            if free.arrays * kind.grows > options.limit:
                bound = kind.replayed(requests, budget, options.limit)
            shares = [f"{one.computed / one.optimum:.4f}" for one in (free, bound)]
            counts = [f"{one.arrays * kind.grows:,}" for one in (free, bound)]
            worse = f"{bound.computed / free.computed - 1:.2%}"
            table.add_row(kind.name, f"{budget:,}", *counts, *shares, worse)
        table.title = f"{len(sessions)} sessions, {len(requests)} requests, {at_once} at once"
        Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
