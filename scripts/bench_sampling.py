"""What drawing freely costs drafts: tokens per forward pass where the embedded model copies, by how they are drawn.

The model reads a file, and its answer begins to write that file again, as an agent's edits do; from there it goes on by
itself. So it leaves the file's words as often as its sampler makes it. All of the server runs, with the costs of a pass
that drafts go by on a published machine.

usage: python3.12 install_and_run.py run scripts/bench_sampling.py [--tokens N] [--seeds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import drafted
from scripts.bench.drafting import MACHINES
from start_llm.core.settings import load_settings
from start_llm.models.embedded import ensure_embedded_model

MACHINE = "M4 Pro"
HERE = Path(__file__).resolve().parent
FILES = ("bench/limits.py", "bench/texts.py", "bench/counting.py", "bench/report.py")
LINES = 60  # of a file that are read
BEGUN = 6  # of them that the answer begins with
WAIT = 600.0
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "built-in": {"temperature": 0.1, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    "0.6 / 0.95 / 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
    "0.6 / 0.95 / 20, min_p 0.05": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
    "1.0 / 0.95 / 20": {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
    "1.0 / 0.95 / 20, min_p 0.05": {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
    "built-in, repetition_penalty 1.05": {
        "temperature": 0.1,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    },
}


@dataclass
class Counted:
    """Of all answers under one sampling. `copied`: characters of them, from their start, that are the file's."""

    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    characters: int = 0

    def add(self, text: str, rest: str, report: dict[str, int]) -> None:
        self.tokens += report["generated"]
        self.forwards += report["forwards"]
        self.drafted += report["drafted"]
        self.accepted += report["accepted"]
        self.characters += len(text)
        self.copied += next((i for i, (a, b) in enumerate(zip(text, rest, strict=False)) if a != b), len(text))


def question(name: str) -> tuple[str, str]:
    """A prompt that ends in the midst of the copy, and how the copy goes on."""
    lines = (HERE / name).read_text("utf-8").splitlines(keepends=True)[:LINES]
    begun, rest = "".join(lines[:BEGUN]), "".join(lines[BEGUN:])
    asked = f"Write this file again, word by word:\n{''.join(lines)}"
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{begun}", rest


def measured(url: str, sampling: dict[str, Any], tokens: int, seeds: int) -> Counted:
    counted = Counted()
    for name in FILES:
        prompt, rest = question(name)
        for seed in range(seeds):
            body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "seed": seed, **sampling}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
            response.raise_for_status()
            data = response.json()
            counted.add(data["choices"][0]["text"], rest, data["usage"]["start_llm"])
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    folder = ensure_embedded_model(load_settings(None).cache_dir, quantised=False, progress=lambda *_: None)
    table = Table("temperature / top_p / top_k", "tokens per pass", "drafted", "taken of them", "copied to the letter")
    with tempfile.TemporaryDirectory() as work, drafted.serving(folder, Path(work), MACHINES[MACHINE]) as url:
        for name, sampling in SAMPLINGS.items():
            one = measured(url, sampling, options.tokens, options.seeds)
            table.add_row(
                name,
                f"{one.tokens / one.forwards:.2f}",
                f"{one.drafted:,} for {one.tokens:,}",
                f"{one.accepted / max(1, one.drafted):.0%}",
                f"{one.copied / max(1, one.characters):.0%}",
            )
            print(name, one, flush=True)
    Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    main()
