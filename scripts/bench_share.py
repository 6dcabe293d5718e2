"""How an answer goes on beside a long prompt: its speed, its longest pause, and how much longer the prompt takes.

The whole server runs on the oracle, whose passes take as long as a large model's: 60 ms for a token, 60 ms x (1 + n/16)
for a chunk of n tokens. An answer is streamed; after some seconds alone a prompt arrives beside it. Then a prompt like
it is computed alone. About seven minutes for 30,000 tokens.

usage: python3.12 install_and_run.py run scripts/bench_share.py [--tokens N] [--share SHARE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.drafted import serving
from tests.oracle.build import build_oracle

PASS = 0.06
PASSES = f"{PASS} {PASS / 16} 0 0"
ALONE_SECONDS = 5.0
WAIT = 1800.0


def words(count: int, seed: int) -> str:
    """Nothing in it is worth a draft."""
    chance = random.Random(seed)
    return " ".join("".join(chance.choices("abcdefghij", k=3)) for _ in range(count))


class Answer(threading.Thread):
    """Streams an answer.

    Attributes:
        times: when each piece came.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self.times, self.over = url, list[float](), threading.Event()

    def run(self) -> None:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "go"}],
            "stream": True,
            "drafts": False,
            "max_tokens": 20_000,
        }
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=WAIT) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if self.over.is_set():
                    return
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.times.append(time.monotonic())


def prompt(url: str, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds until the first token of an answer to a prompt, and how many of its tokens were computed."""
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": words(tokens, seed)}]}
    began = time.monotonic()
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    response.raise_for_status()
    return time.monotonic() - began, int(response.json()["usage"]["start_llm"]["computed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=10_000, help="words of the prompt, which has some tokens more")
    parser.add_argument("--share", default="0.5", help="DECODE_SHARE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"DECODE_SHARE": options.share}):
        work = Path(folder)
        (work / "reply.txt").write_text(words(10_000, 1), "utf-8")
        with serving(build_oracle(work / "oracle", "plain"), work, {1: 1.0}, passes=PASSES) as url:
            answer = Answer(url)
            answer.start()
            while not answer.times:
                time.sleep(0.1)
            time.sleep(ALONE_SECONDS)
            began = time.monotonic()
            beside, computed = prompt(url, options.tokens, 2)
            times = [at for at in answer.times if began <= at <= began + beside]
            before = [at for at in answer.times if began - ALONE_SECONDS / 2 <= at < began]
            answer.over.set()
            answer.join(60)
            alone, _ = prompt(url, options.tokens, 3)
    speed = (len(times) / beside) / (len(before) / (ALONE_SECONDS / 2))
    gap = max(b - a for a, b in zip([began, *times], times, strict=False))
    print(
        f"a prompt of {computed:,} tokens beside an answer: {beside:.1f} s, alone {alone:.1f} s: {beside / alone:.2f} x"
    )
    print(f"the answer beside it: {speed:.2f} of its speed alone; longest pause {gap:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
