"""What a turn costs beside its new tokens: render, tokenise, hash, look up, restore; over growing conversations.

Times are CPU milliseconds, all threads together, so that other programs on the machine do not count.

    python3.12 install_and_run.py run scripts/bench_overhead.py        # 1k, 10k, 50k, 200k tokens
    python3.12 install_and_run.py run scripts/bench_overhead.py --sizes 1000,10000
    python3.12 install_and_run.py run scripts/bench_overhead.py --guard chatml,glm4,mistral --sizes 1000,30000

``--guard`` measures something else: what it costs to look for control tokens in what clients send, in per cent of
making a prompt, by family of templates (`scripts/bench/guarding.py`).

- hash: the SHA-256 chain over all tokens.
- lookup: the longest usable prefix against 1,000 stored sequences, which branch off one conversation of that size
  everywhere or share only its first 100 tokens. Asked for: all of it, half of it, 100 tokens of it; the medians of the
  cheapest and of the dearest question, each with a fresh tuple of tokens.
- restore: a hit's caches, and the bytes it copied.
- turn: render, tokenise and match turn N+1 of a conversation whose turn N is remembered; the chat template's own
  rendering is timed apart and taken off.
- mlx-lm trie: mlx-lm's own prompt trie with *one* stored sequence that parts from the question at token 100. It is
  quadratic: sizes that would take longer than --limit are extrapolated from the largest one that was run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, PromptTrie
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from scripts.bench.guarding import costs
from scripts.bench.texts import Writer
from start_llm.core.messages import Message, Tool
from start_llm.core.request import ChatRequest
from start_llm.core.settings import load_settings
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from tests.oracle.build import build_oracle

STORED, SHARED, TAIL = 1000, 100, 500
VOCABULARY = 6000


@dataclass
class Row:
    """One size; milliseconds, tokens and bytes. ``trie_extrapolated``: not run, told from a smaller size."""

    tokens: int
    hash_ms: float
    lookup_ms: float
    lookup_worst_ms: float
    restore_ms: float
    copied_bytes: int
    turn_ms: float
    template_ms: float
    turn_without_template_ms: float
    trie_ms: float
    trie_extrapolated: bool


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of CPU time, all threads, and the result."""
    started = time.process_time()
    result = run()
    return (time.process_time() - started) * 1000, result


def median(run: Callable[[], Any], times: int = 5) -> float:
    return statistics.median(timed(run)[0] for _ in range(times))


def _filled(kit: LayerKit, length: int) -> list[Any]:
    cache = kit.new()
    rows = mx.zeros((1, 1, length, 1))
    for layer in cache:
        layer.state = (rows, rows, length)
    return cache


def stored_sequences(size: int) -> tuple[KVStore, np.ndarray[Any, Any], np.random.Generator]:
    """A store with one conversation of `size` tokens and 999 that branch off it, half of them near its beginning."""
    random = np.random.default_rng(size)
    main = random.integers(0, VOCABULARY, size, dtype=np.int32)
    kit = LayerKit(lambda: [KVCache()])
    store = KVStore(kit, StoreConfig(1 << 36))
    store.put(tuple(main.tolist()), _filled(kit, size))
    for number in range(STORED - 1):
        at = SHARED if number % 2 else int(random.integers(min(SHARED, size - 1), size))
        branch = np.concatenate([main[:at], random.integers(0, VOCABULARY, TAIL, dtype=np.int32)])
        store.put(tuple(branch.tolist()), _filled(kit, len(branch)))
    return store, main, random


def measure_store(size: int) -> dict[str, float]:
    store, main, random = stored_sequences(size)
    new = random.integers(0, VOCABULARY, TAIL, dtype=np.int32)
    questions = [np.concatenate([main[:at], new]) for at in (size, size // 2, min(SHARED, size // 2))]
    lookups = [[timed(partial(store.lookup, tuple(q.tolist())))[0] for _ in range(5)] for q in questions]
    tokens = tuple(questions[0].tolist())
    plan = store.lookup(tokens)
    restore, restored = timed(lambda: store.restore(tokens, plan))
    return {
        "hash_ms": median(lambda: hashlib.sha256(main.tobytes()).digest()),
        "lookup_ms": min(map(statistics.median, lookups)),
        "lookup_worst_ms": max(map(statistics.median, lookups)),
        "restore_ms": restore,
        "copied_bytes": restored.copied_bytes,
    }


def _conversation(size: int, count: Callable[[str], int]) -> tuple[list[Message], tuple[Tool, ...]]:
    """An agent's history of about `size` tokens, the answer to its last message still to come."""
    writer = Writer(f"overhead-{size}")
    messages = [Message("system", writer.system(min(100, size // 100)))]
    tools = tuple(
        Tool(t["function"]["name"], t["function"]["description"], t["function"]["parameters"])
        for t in writer.tools()[: size // 1000]
    )
    held = sum(count(json.dumps(tool.as_function())) for tool in tools) + count(messages[0].content)
    per_line = 0
    while True:
        lines = 30 if not per_line else max(1, min(30, (size - held) // per_line))
        question = Message("user", writer.task(lines))
        per_line = per_line or max(1, count(question.content) // (lines + 1))
        messages.append(question)
        held += count(question.content)
        if held >= size - 200:
            return messages, tools
        answer = Message("assistant", writer.prose(8))
        messages.append(answer)
        held += count(answer.content)


def measure_turn(size: int, checkpoint: Path) -> tuple[dict[str, float], int]:
    """Milliseconds for turn N+1 (the median of five that follow each other), and tokens of the prompt at turn N."""
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    template, coder = HFTemplate(tokenizer), HFTokenizer(tokenizer)
    pipeline = Pipeline(template, coder, settings=load_settings(None))
    messages, tools = _conversation(size, lambda text: len(coder.encode(text)))
    turns, templates, tokens = [], [], 0
    end = coder.encode("<|im_end|>")
    for number in range(6):
        request = ChatRequest(f"r{number}", "chat", "m", tuple(messages), tools)
        spent, prepared = timed(partial(pipeline.prepare, request, thinking=True))
        dicts = [{"role": message.role, "content": message.content} for message in messages]
        functions = [tool.as_function() for tool in tools]
        alone, _ = timed(partial(template.render, dicts, functions, True))
        if number:  # the first one has nothing to go on from
            turns.append(spent)
            templates.append(alone)
        answer = Message("assistant", Writer(f"answer-{number}").prose(8))
        pipeline.record(prepared, answer, [*coder.encode(answer.content), *end])
        messages += [answer, Message("user", Writer(f"question-{number}").task())]
        tokens = tokens or len(prepared.prompt.tokens)
    turn, rendering = statistics.median(turns), statistics.median(templates)
    without = statistics.median(max(0.0, a - b) for a, b in zip(turns, templates, strict=True))
    return {"turn_ms": turn, "template_ms": rendering, "turn_without_template_ms": without}, tokens


def measure_trie(size: int) -> float:
    """Milliseconds of one search in mlx-lm's trie, with one stored sequence that parts from the question at 100."""
    random = np.random.default_rng(size)
    stored = random.integers(0, VOCABULARY, size).tolist()
    trie = PromptTrie()
    trie.add("model", stored, object())
    asked = [*stored[:SHARED], *(token + VOCABULARY for token in stored[SHARED:])]
    return timed(lambda: trie.search("model", asked))[0]


def measure(sizes: list[int], limit: float, checkpoint: Path) -> list[Row]:
    rows: list[Row] = []
    last_size, last_ms = 0, 0.0
    for size in sizes:
        expected = last_ms * (size / last_size) ** 2 if last_size else 0.0
        extrapolated = expected > limit * 1000
        trie = expected if extrapolated else measure_trie(size)
        if not extrapolated:
            last_size, last_ms = size, trie
        turn, tokens = measure_turn(size, checkpoint)
        figures: dict[str, Any] = {**measure_store(size), **turn}
        rows.append(Row(tokens, **figures, trie_ms=trie, trie_extrapolated=extrapolated))
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title=f"Overhead per turn, CPU milliseconds; {STORED:,} stored sequences")
    headings = ("tokens", "hash", "lookup", "lookup, worst", "restore", "bytes copied", "turn N+1", "of it template")
    for heading in (*headings, "turn without template", "mlx-lm trie"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.hash_ms, row.lookup_ms, row.lookup_worst_ms, row.restore_ms)
        rest = (row.turn_ms, row.template_ms, row.turn_without_template_ms)
        trie = f"{'~' if row.trie_extrapolated else ''}{row.trie_ms:,.1f}"
        cells = [f"{row.tokens:,}", *(f"{t:.2f}" for t in times), f"{row.copied_bytes:,}", *(f"{t:.1f}" for t in rest)]
        table.add_row(*cells, trie)
    Console(width=160).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,50000,200000", help="tokens, ascending, comma-separated")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that one search of mlx-lm's trie may take")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--guard", default="", help="families of templates, comma-separated: measure the guard alone")
    parser.add_argument("--rounds", type=int, default=10, help="with --guard: prompts of each kind")
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.guard:
        for family, size in product(options.guard.split(","), sizes):
            for cost in costs(family, size, options.rounds):
                print(json.dumps(cost), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_oracle(Path(folder), "plain")
        rows = measure(sizes, options.limit, checkpoint)
    show(rows)
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
