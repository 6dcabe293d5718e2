"""How many arrays a large store's KV is in, and what the device's limit of buffers costs.

Metal has room for so many buffers, however small they are (`resource_limit` of MLX's device info: 499,000); stored KV
stays under 60% of that: small arrays are packed, and if that is not enough, KV is evicted. Recorded sessions are
replayed through the real store as in `bench_sessions`, with and without that limit. The model has 64 layers, with KV of
a few bytes a token. At first so many short segments with a checkpoint each are packed, and the steps of that timed.

usage: python3.12 install_and_run.py run scripts/bench_arrays.py PATH.. [--bytes N] [--limit N] [--at-once N..]
       [--segments N]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_sessions import Device, Request, Score, TinyModel, read_sessions, replay_ours, timeline
from start_llm.kvcache.store import KVStore, StoreConfig

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
        """Of a checkpoint: two for each other layer."""
        return max(2 * (64 - self.grows), 1)

    def replayed(self, requests: Sequence[Request], budget: int, limit: int) -> Score:
        """`budget`: tokens. `limit`: arrays; 0: none."""
        arrays = self.state_arrays, limit
        return replay_ours(requests, budget, DEVICE, self.state_tokens, None, arrays=arrays, layers=self.grows)[0]


KINDS = (
    Kind("attention only", 64, 64 * 4096),
    Kind("recurrent, as a 27B hybrid", 16, 16 * 4096, 2304),
    Kind("recurrent, small states", 16, 16 * 4096, 256),
    Kind("windows of 128", 32, 32 * 2048, 128),
)


def timed_packing(segments: int) -> str:
    """Fills a store of a hybrid, and packs everything in it."""
    model = TinyModel(256, 96, 16)
    store = KVStore(model.kit, StoreConfig(1 << 50), clock=itertools.count().__next__)
    cache = model.kit.new()
    model.prefill(cache, 8)
    for number in range(segments):
        store.put(range(8 * number, 8 * number + 8), cache)
    resident, more = store.resident, True
    before, walls, works = resident.arrays, [], []
    mx.clear_cache()
    while more:
        begun, worked = time.perf_counter(), time.process_time()
        more = resident.pack(0)
        walls.append(1000 * (time.perf_counter() - begun))
        works.append(1000 * (time.process_time() - worked))
    found = f"{segments} segments of 16 layers with states of 48: {before:,} arrays, {resident.arrays:,} packed"
    longest = f"the longest {max(walls):.1f} ms (on the processor {max(works):.1f} ms)"
    return f"{found}, in {len(walls)} steps of {statistics.median(walls):.1f} ms, {longest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH")
    parser.add_argument("--bytes", type=float, default=400e9, help="of stored KV")
    parser.add_argument("--limit", type=int, default=499_000 * 60 // 100, help="arrays")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 24], help="sessions at once")
    parser.add_argument("--longest", type=int, default=200_000, help="leave out sessions with longer prompts")
    parser.add_argument("--kinds", type=int, nargs="+", default=range(len(KINDS)), help="by their place in the list")
    parser.add_argument("--segments", type=int, default=10_000, help="to pack at first; 0: none")
    options = parser.parse_args()
    if options.segments:
        print(timed_packing(options.segments), flush=True)
    sessions = [one for one in read_sessions(options.paths) if one.longest <= options.longest]
    for at_once in options.at_once if sessions else ():
        requests = timeline(sessions, at_once)
        table = Table(
            "model", "tokens", "arrays, no limit", "arrays", "computed / optimum, no limit", "with it", "worse"
        )
        for kind in (KINDS[place] for place in options.kinds):
            budget = int(options.bytes / kind.token_bytes)
            free = bound = kind.replayed(requests, budget, 0)
            if free.arrays > options.limit:
                bound = kind.replayed(requests, budget, options.limit)
            shares = [f"{one.computed / one.optimum:.4f}" for one in (free, bound)]
            counts = [f"{one.arrays:,}" for one in (free, bound)]
            worse = f"{bound.computed / free.computed - 1:.2%}"
            row = kind.name, f"{budget:,}", *counts, *shares, worse
            print(f"{at_once} at once:", *row, sep="  ", file=sys.stderr, flush=True)  # each takes up to an hour
            table.add_row(*row)
        table.title = f"{len(sessions)} sessions, {len(requests)} requests, {at_once} at once"
        Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
