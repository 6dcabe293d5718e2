"""What drafts from the conversation save: tokens per forward pass in a recorded session, and wall time on this machine.

1. A session recorded by the PI agent (`--session FILE.jsonl`) is replayed token by token, with calls in XML and in
   JSON, for models whose KV can be cut and for hybrids. No model runs; the modelled speed-ups use published costs.
2. With `--served` the same requests go through the whole server, on the oracle with the embedded model's tokenizer,
   plain and hybrid: what it does is printed beside what the replay says that it should do.
3. The embedded model says what a recording says: its forward passes and its sampler's work are real, only the drawn
   token is replaced. Three loops take turns: `BatchGenerator`, our loop without drafts, and with them. Once for edits
   of a file that stands in the prompt, once for text that never repeats, once for text that begins to repeat all the
   time and then goes on otherwise.

usage: python3.12 install_and_run.py run scripts/bench_drafts.py [--session FILE] [--served] [--turns N] [--rounds N]
       [--tokens N] [--no-wall]
"""

from __future__ import annotations

import argparse
import copy
import difflib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import drafted
from scripts.bench.drafting import MACHINES, CallStyle, Fixed, Gated, replay, turns
from start_llm.core.settings import load_settings
from start_llm.engine.alone import AloneRunner
from start_llm.engine.costs import Acceptance, CostTable, Gate
from start_llm.engine.draft import RowDrafts, SuffixIndex
from start_llm.engine.measure import measure_passes
from start_llm.engine.runner import Runner
from start_llm.engine.sampling import Remembering
from start_llm.engine.text import BatchRunner
from start_llm.models.embedded import ensure_embedded_model
from start_llm.models.loader import accelerator
from tests.oracle.build import Kind, build_oracle

STYLES: tuple[CallStyle, ...] = ("xml", "json")
KINDS: tuple[Kind, ...] = ("plain", "hybrid")
MACHINE = "M4 Pro"  # whose costs the served session goes by
MEASURING = 8.0  # seconds; a server takes one
NEVER = 10**9  # no end token: the recording's length ends an answer
SOURCE = Path(__file__).resolve().parent / "bench" / "servers.py"


class Recorded(Remembering):
    """Draws greedily, and then says what was recorded."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._place = tokens, 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = self._tokens[min(self._place, len(self._tokens) - 1)]
        self._place += 1
        return mx.argmax(logprobs, axis=-1) * 0 + token


def simulated(path: Path, encode: Callable[[str], list[int]], most: int | None) -> Table:
    table = Table("calls", "model", "drafts", "predicted", "tokens per forward", *(f"on {name}" for name in MACHINES))
    for style in STYLES:
        session = list(islice(turns(path, encode, style), most))
        for carry in (False, True):
            kind = "hybrid" if carry else "plain"
            totals = replay(session, Fixed(), carry=carry)
            table.add_row(
                *(style, kind, "3 or 31", f"{totals.accepted / totals.said:.0%}", f"{totals.per_forward:.2f}"),
                *(f"{totals.speed_up(costs):.2f}" for costs in MACHINES.values()),
            )
            gated = [(replay(session, Gated(costs, carry), carry=carry), costs) for costs in MACHINES.values()]
            table.add_row(
                *(style, kind, "by the gate", ""),
                " ".join(f"{one.per_forward:.2f}" for one, _ in gated),
                *(f"{one.speed_up(costs):.2f}" for one, costs in gated),
            )
    return table


def served(path: Path, tokenizer_folder: Path, most: int | None, console: Console) -> None:
    """Prints a line for each kind of call and model, once it is done."""
    tokenizer = drafted.tokenizer_for_oracle(tokenizer_folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    costs = MACHINES[MACHINE]
    for style in STYLES:
        requests, session = (
            list(islice(drafted.asked(path, style), most)),
            list(islice(turns(path, encode, style), most)),
        )
        for kind in KINDS:
            carry = kind == "hybrid"
            expected = replay(session, Gated(costs, carry), carry=carry)
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder)
                template = "xml" if style == "xml" else "plain"
                checkpoint = build_oracle(work / "oracle", kind, template=template, tokenizer=tokenizer)
                with drafted.serving(checkpoint, work, costs) as url:
                    totals = drafted.replay(url, work / "reply.txt", requests, drafted.tools_of(path))
            console.print(
                f"{style}, {kind}: {len(requests)} answers, {totals.said:,} tokens, {totals.forwards:,} passes; tokens "
                f"per pass {totals.per_forward:.2f}, simulated {expected.per_forward:.2f}"
            )


def edits(encode: Callable[[str], list[int]], tokens: int) -> tuple[list[int], list[int]]:
    """A prompt with a file, and an answer of so many tokens that edits it: old text, new text, a word between."""
    code = SOURCE.read_text("utf-8")
    prompt = encode(
        f"<|im_start|>user\nRename what is hard to read in {SOURCE.name}:\n{code}<|im_end|>\n<|im_start|>assistant\n"
    )
    lines, said, at = code.splitlines(keepends=True), "", 20
    chance = random.Random(1)
    while len(encode(said)) < tokens:
        old = lines[at : at + 8]
        new = [line.replace("process", "child").replace("url", "address").replace("port", "number") for line in old]
        if new == old:
            new[-1] = new[-1].rstrip("\n") + "  # see above\n"
        changed = sum(op != "equal" for op, *_ in difflib.SequenceMatcher(None, old, new).get_opcodes())
        said += (
            f"Change {chance.randrange(10**6)}, {changed} place(s).\n<tool_call>\n<function=edit>\n<parameter=path>\n"
            f"{SOURCE.name}\n</parameter>\n<parameter=oldText>\n{''.join(old)}</parameter>\n"
            f"<parameter=newText>\n{''.join(new)}</parameter>\n</function>\n</tool_call>\n"
        )
        at = (at + 11) % (len(lines) - 8)
    return prompt, encode(said)[:tokens]


def unlike(vocab: int, tokens: int) -> tuple[list[int], list[int]]:
    """A prompt and an answer in which no token stands twice."""
    drawn = random.Random(2).sample(range(100, vocab), 1000 + tokens)
    return drawn[:1000], drawn[1000:]


def misleading(vocab: int, tokens: int) -> tuple[list[int], list[int]]:
    """Runs of five tokens that stand in the prompt, each followed there by other tokens than in the answer."""
    chance = random.Random(3)
    drawn = chance.sample(range(100, vocab), 1000)
    said: list[int] = []
    while len(said) < tokens:
        at = chance.randrange(len(drawn) - 5)
        said += [*drawn[at : at + 5], chance.randrange(100, vocab)]
    return drawn, said[:tokens]


def prefilled(model: Any, prompt: list[int]) -> list[Any]:
    """All of the prompt but its last token."""
    cache, runner = make_prompt_cache(model), BatchRunner(model, eos=[NEVER], max_rows=1)
    for at in range(0, len(prompt) - 1, 512):
        runner.prefill(cache, prompt[at : min(at + 512, len(prompt) - 1)])
    return list(cache)


def seconds(runner: Runner, cache: list[Any], prompt: list[int], said: list[int], drafts: RowDrafts | None) -> float:
    """From the first reported token to the last."""
    runner.insert(
        prompt, copy.deepcopy(cache), max_tokens=len(said), sampler=Recorded(said), processors=[], drafts=drafts
    )
    began, heard = 0.0, list[int]()
    while len(heard) < len(said):
        rows = runner.decode()
        heard += [row.token for row in rows]
        began = began or (time.perf_counter() if heard else 0.0)
    took = time.perf_counter() - began
    assert heard == said, "the recording was not said"
    return took


def wall(model: Any, prompt: list[int], said: list[int], gate: Gate, rounds: int) -> tuple[dict[str, float], RowDrafts]:
    """Medians of seconds by loop."""
    times: dict[str, list[float]] = {"BatchGenerator": [], "alone": [], "alone, drafts": []}
    drafts, cache = RowDrafts(), prefilled(model, prompt)
    for turn in range(rounds):
        for name, found in times.items() if turn % 2 else reversed(times.items()):
            batch = BatchRunner(model, eos=[NEVER], max_rows=2)
            runner = (
                batch
                if name == "BatchGenerator"
                else AloneRunner(model, batch, eos=[NEVER], gate=gate if "drafts" in name else None)
            )
            index = SuffixIndex(prompt)
            given = RowDrafts(lambda index=index: index)  # type: ignore[misc]
            found.append(seconds(runner, cache, prompt, said, given))
            drafts = given if "drafts" in name else drafts
    return {name: statistics.median(found) for name, found in times.items()}, drafts


def costs_table(costs: CostTable) -> Table:
    measured = costs.table()
    table = Table("context", *(str(width) for width in next(iter(measured.values()))))
    for length, row in measured.items():
        table.add_row(f"{length:,}", *(f"{1e3 * value:.0f}" for value in row.values()))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--session", type=Path, default=None, help="a PI session; without one, 1. is left out")
    parser.add_argument("--served", action="store_true", help="with --session: also 2.")
    parser.add_argument("--turns", type=int, default=None, help="with --session: only its first answers")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-wall", action="store_true", help="leave 3. out")
    options = parser.parse_args()
    console = Console()
    cache = Path(load_settings(None).cache_dir)
    folder = ensure_embedded_model(cache, quantised=accelerator().backend != "cpu", progress=lambda *_: None)
    model, tokenizer, *_ = load(str(folder))

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    if options.session is not None:
        console.print(simulated(options.session, encode, options.turns))
        if options.served:
            served(options.session, folder, options.turns, console)
    if options.no_wall:
        return 0
    began = time.perf_counter()
    costs = CostTable(measure_passes(model, lambda: make_prompt_cache(model), MEASURING))
    console.print(f"\nmilliseconds of a pass by width, measured in {time.perf_counter() - began:.1f} s")
    console.print(costs_table(costs))
    gate = Gate(costs, Acceptance())
    table = Table("seconds", "BatchGenerator", "alone", "alone, drafts", "speed-up", "tokens per forward")
    cases = {
        "edits": edits(encode, options.tokens),
        "never repeats": unlike(len(tokenizer), options.tokens),
        "misleads": misleading(len(tokenizer), options.tokens),
    }
    for name, (prompt, said) in cases.items():
        medians, drafts = wall(model, prompt, said, gate, options.rounds)
        table.add_row(
            name,
            *(f"{value:.2f}" for value in medians.values()),
            f"{medians['BatchGenerator'] / medians['alone, drafts']:.3f}",
            f"{len(said) / max(1, drafts.counts.forwards):.2f}",
        )
    console.print(table)
    console.print("milliseconds of a pass as observed since")
    console.print(costs_table(gate.costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
