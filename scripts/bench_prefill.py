"""Prefill by step size: tokens per second, the longest wait between two steps, and the memory that a step takes.

Fixed sizes beside `auto`, alone and with somebody waiting, on one model in one run; alternating, medians.

usage: python3.12 install_and_run.py run scripts/bench_prefill.py [--model PATH] [--tokens N] [--rounds N] [--sizes N..]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.core.settings import load_settings
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.schedule.steps import StepSize
from start_llm.models.background import at_once
from start_llm.models.device import GIB, PREFILL_BYTES, inspect_device
from start_llm.models.loader import BasesInMemory, LoadedModel, accelerator, find_model, load_steps


@dataclass(frozen=True)
class Found:
    """One prompt: its speed, its longest step, the most that a step allocated, the largest step."""

    tokens_per_second: float
    longest: float
    most_bytes: int
    largest: int


def prefill(runner: BatchRunner, loaded: LoadedModel, prompt: list[int], steps: StepSize, shared: bool) -> Found:
    cache, at = loaded.make_cache(), 0
    seconds, nbytes, sizes = [], [], []
    while at < len(prompt):
        size = min(steps.next(at, shared=shared), len(prompt) - at)
        began = time.perf_counter()
        nbytes.append(runner.prefill(cache, prompt[at : at + size]))
        seconds.append(time.perf_counter() - began)
        sizes.append(size)
        at += size
        steps.measure(size, at, seconds[-1], nbytes[-1])
    return Found(len(prompt) / sum(seconds), max(seconds), max(nbytes), max(sizes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None, help="folder or repository; the embedded model if it is left out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    options = parser.parse_args()
    console = Console()
    settings = load_settings(None, model_path=options.model)
    model = find_model(settings, inspect_device(accelerator), lambda step, part: None, console.print)
    loaded = at_once(load_steps(model, lambda step, part: None, console.print, BasesInMemory()))
    runner = BatchRunner(loaded.model, eos=loaded.eos, max_rows=1)
    tokens = min(options.tokens, loaded.capabilities.context - 1)
    prompt = np.random.default_rng(0).integers(0, len(loaded.tokenizer) // 2, tokens).tolist()
    # `auto` keeps what it has learnt from one prompt to the next, as in a server.
    alone, shared = StepSize(None, PREFILL_BYTES), StepSize(None, PREFILL_BYTES)
    ways: dict[str, Callable[[], Found]] = {
        **{str(n): lambda n=n: prefill(runner, loaded, prompt, StepSize(n, 0), False) for n in options.sizes},  # type: ignore[misc]
        "auto, alone": lambda: prefill(runner, loaded, prompt, alone, False),
        "auto, somebody waits": lambda: prefill(runner, loaded, prompt, shared, True),
    }
    found: dict[str, list[Found]] = {way: [] for way in ways}
    prefill(runner, loaded, prompt[:600], StepSize(512, 0), False)  # kernels are compiled at their first use
    for _ in range(options.rounds):
        for way, run in ways.items():
            found[way].append(run())
    table = Table(f"step ({tokens} tokens)", "tokens/s", "longest step, s", "memory of a step, GiB", "largest step")
    for way, rounds in found.items():
        table.add_row(
            way,
            f"{statistics.median(r.tokens_per_second for r in rounds):.0f}",
            f"{statistics.median(r.longest for r in rounds):.2f}",
            f"{max(r.most_bytes for r in rounds) / GIB:.2f}",
            str(max(r.largest for r in rounds)),
        )
    console.print(table)
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
