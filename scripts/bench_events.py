"""What publishing KV events costs the model thread while 100,000 blocks a second are stored and evicted.

    python3.12 install_and_run.py run scripts/bench_events.py            # 20 pairs of rounds of a second
    python3.12 install_and_run.py run scripts/bench_events.py --rounds 40 --rate 200000

One thread stands for the model thread: it computes with MLX, step by step, and from time to time it tells of runs that
were evicted, as the store does (`ResidentKV.tell_evicted`). A second one stands for the recorder: it announces what is
stored. Rounds with the publisher and rounds with nobody who listens follow each other.

- calls: CPU time of the model thread for telling, as a part of the round; the least of all rounds and the median. Noise
  only adds to it: other processes take what is in the processor's caches.
- steps_lost: how many fewer steps a round has with the publisher (median of pairs). That holds waiting for Python's
  lock, too, and the noise of the machine: see the quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.kvcache.blocks import Tokens
from start_llm.kvcache.events import BLOCK
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.publisher import KVEventPublisher
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import RestorePlan

RUN = 2048  # tokens of a segment
RUNS = 20  # of a conversation
TELL_SECONDS = 0.02  # between two evictions; a clock that is read for each run costs more than the run
WIDTH = 192  # of the matrices of a step: about a millisecond


@dataclass
class Round:
    """A second of one model thread."""

    steps: int
    calls: float  # part of the round
    blocks: int  # said as stored or evicted


def held(tokens: Tokens, limit: int) -> RestorePlan:
    return RestorePlan(len(tokens), len(tokens), len(tokens))


class Evictions:
    """Conversations whose runs are given up, the last one first, again and again."""

    def __init__(self, runs: list[Tokens], events: KVEventPublisher | None) -> None:
        self._resident = ResidentKV(LayerKit(list), events)
        self._waiting: list[Segment] = []
        for begin in range(0, len(runs), RUNS):
            self._resident.tree.extend(np.concatenate(runs[begin : begin + RUNS]))

    def tell(self, count: int) -> float:
        """Of so many runs. Returns the CPU seconds of this thread that telling took."""
        if len(self._waiting) < count:
            for segment in self._resident.tree:
                segment.path_hash = None  # as of conversations of which nobody was told
            self._waiting = list(self._resident.tree)
        now, self._waiting = self._waiting[-count:], self._waiting[:-count]
        before = time.thread_time()
        for segment in reversed(now):
            self._resident.tell_evicted(segment)
        return time.thread_time() - before


def model_thread(events: KVEventPublisher | None, runs: list[Tokens], rate: int, seconds: float) -> Round:
    """Steps of the model; half of the events are evictions, which this thread tells of."""
    matrix, evictions = mx.random.normal((WIDTH, WIDTH)), Evictions(runs, events)
    each = round(rate / 2 / (RUN // BLOCK) * TELL_SECONDS)
    steps, told, spent = 0, 0, 0.0
    began = now = time.perf_counter()
    while now - began < seconds:
        mx.eval(matrix @ matrix)
        while told < (now - began) / TELL_SECONDS:
            spent += evictions.tell(each)
            told += 1
        steps += 1
        now = time.perf_counter()
    return Round(steps, spent / (now - began), told * each * (RUN // BLOCK))


def recorder(events: KVEventPublisher | None, runs: list[Tokens], rate: int, stop: threading.Event) -> None:
    """Announces runs at half of the rate, in bursts of 10 ms."""
    each = max(1, round(rate / 2 / (RUN // BLOCK) / 100))
    index = 0
    while not stop.wait(0.01):
        for _ in range(each):
            index += 1
            if events is not None:
                events.announce(runs[index % len(runs)], runs[index % len(runs)], held)


def round_with(events: KVEventPublisher | None, runs: list[Tokens], rate: int, seconds: float) -> Round:
    stop = threading.Event()
    thread = threading.Thread(target=recorder, args=(events, runs, rate, stop))
    thread.start()
    try:
        return model_thread(events, runs, rate, seconds)
    finally:
        stop.set()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rate", type=int, default=100_000, help="blocks a second")
    options = parser.parse_args()
    chance = np.random.default_rng(1)
    runs = [chance.integers(0, 30_000, RUN, dtype=np.int32) for _ in range(200)]
    publisher = KVEventPublisher("tcp://127.0.0.1:0")
    publisher.start()
    losses, rounds = [], []
    model_thread(None, runs, options.rate, 0.5)  # warms up
    for number in range(options.rounds):
        pair = (None, publisher) if number % 2 else (publisher, None)
        measured = [(each, round_with(each, runs, options.rate, options.seconds)) for each in pair]
        without, with_it = (found for each, found in sorted(measured, key=lambda one: one[0] is publisher))
        losses.append(1 - with_it.steps / without.steps)
        rounds.append(with_it)
    low, middle, high = statistics.quantiles(losses, n=4)
    found = {
        "blocks_a_second": round(2 * statistics.mean(each.blocks for each in rounds) / options.seconds),
        "calls": min(each.calls for each in rounds),
        "calls_median": statistics.median(each.calls for each in rounds),
        "steps_lost": middle,
        "steps_lost_quartiles": (low, high),
        "publisher": publisher.figures(),
        "last": asdict(rounds[-1]),
    }
    publisher.stop()
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
