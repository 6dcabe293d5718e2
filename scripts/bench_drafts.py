"""What drafts from the conversation save: tokens per forward pass in a recorded session, and wall time on this machine.

1. A session recorded by the PI agent (`--session FILE.jsonl`) is replayed token by token, with calls in XML and in
   JSON, for models whose KV can be cut and for hybrids. No model runs; the modelled speed-ups use published costs.
2. With `--served` only the same requests go through the whole server, on the oracle with the embedded model's
   tokenizer, plain and hybrid: what it does is printed beside what the replay says that it should do. The gate goes by
   what it measures: the oracle's passes take as long as `--passes` says, on a clock for which nobody waits. A
   device computes them beside the loop, as on Metal: a pass is launched, which takes the loop `--launching`, and what
   the loop does until it reads the result costs no time unless it takes longer than the pass. So what drafts cost is
   what the loop does while the device waits for it. With `--waits` each pass is waited for at once, as where a model
   computes on the processor: all that the loop does takes time then.
   `--context 1000 32000 100000 200000` puts so many tokens in front. All of a session takes minutes of computing;
   `--first`, `--turns` and `--limit` cut it into parts. Without a session the text is one that never repeats: what
   drafts cost there, in passes and in what the loop computes beside them.
3. The embedded model says what a recording says: its forward passes and its sampler's work are real, only the drawn
   token is replaced. Three loops take turns of a few tokens: `BatchGenerator`, our loop without drafts, and with them.
   So a busy machine slows all alike; CPU time stands beside wall time for the same reason. Once for edits of a file
   that stands in the prompt, once for text that never repeats, once for text that begins to repeat all the time and
   then goes on otherwise, and once in two rows, which are decoded in a batch. About six minutes on two busy cores.

usage: python3.12 install_and_run.py run scripts/bench_drafts.py [--session FILE] [--turns N] [--tokens N] [--seconds N]
       [--case NAME] [--no-wall]
       python3.12 install_and_run.py run scripts/bench_drafts.py --served [--context N ...] [--tokens N]
       python3.12 install_and_run.py run scripts/bench_drafts.py --session FILE --served [xml-plain] [json-plain] ...
       [--context N ...] [--passes "SECONDS A_TOKEN CONTEXT BOTH"] [--launching SECONDS] [--waits] [--first N]
       [--turns N] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import copy
import difflib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from operator import truediv
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import drafted
from scripts.bench.drafting import MACHINES, CallStyle, Fixed, Gated, OraclePasses, Totals, replay, turns
from scripts.bench.virtual import VirtualClock
from start_llm.core.settings import load_settings
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.draft import RowDrafts, SuffixIndex
from start_llm.engine.decode.gate import MOST_DRAFTED, WIDTHS, DraftGate, PassCosts
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import Remembering, RowState
from start_llm.models.embedded import ensure_embedded_model
from start_llm.models.loader import accelerator
from tests.oracle.build import Kind, build_oracle

STYLES: tuple[CallStyle, ...] = ("xml", "json")
KINDS: tuple[Kind, ...] = ("plain", "hybrid")
PASSES = "0.01 0.0001 0 0"  # seconds of the oracle's passes, see `ORACLE_PASS`: 10 ms x (1 + width / 100)
TELL_EVERY = 10  # answers
NEVER = 10**9  # no end token: the recording's length ends an answer
PROMPT = 300  # tokens, where no file is needed
SLICE = 8  # tokens of a turn
TODAY, ALONE, DRAFTING = LOOPS = ("BatchGenerator", "alone", "alone, drafts")
SOURCE = Path(__file__).resolve().parent / "bench" / "drifts.py"


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


@dataclass(frozen=True)
class Part:
    """Of a session: its answers behind the first ones, up to a last one, for so many seconds.

    Attributes:
        front: tokens that are put in front of all of it.
        passes: how long the oracle's passes take.
        launching: seconds of the model thread that a pass takes beside that.
        waits: for each pass at once.
    """

    first: int
    last: int | None
    limit: float
    front: int
    passes: str
    launching: float
    waits: bool


def served(
    path: Path, tokenizer_folder: Path, style: CallStyle, kind: Kind, part: Part, fixed: bool, console: Console
) -> None:
    """Prints a line every few answers, and then what it was and what it should have been."""
    tokenizer, carry = drafted.tokenizer_for_oracle(tokenizer_folder), kind == "hybrid"
    requests = list(islice(drafted.asked(path, style), part.last))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def tell(answers: int, totals: Totals) -> None:
        if answers % TELL_EVERY == 0:
            print(f"{style}, {kind}: {answers} of {len(requests)} answers, {totals.per_forward:.3f}", flush=True)

    front = filler(part.front, encode)
    with tempfile.TemporaryDirectory() as folder:
        work, template = Path(folder), "xml" if style == "xml" else "plain"
        checkpoint = build_oracle(
            work / "oracle", kind, template=template, tokenizer=tokenizer, layers=["A", "K"] if carry else ["K"]
        )
        clock = VirtualClock(launching=part.launching, waits=part.waits)
        with drafted.serving(checkpoint, work, fixed=fixed, passes=part.passes, clock=clock) as url:
            answers, totals = drafted.replay(
                url,
                work / "reply.txt",
                requests,
                drafted.tools_of(path),
                front=front,
                first=part.first,
                limit=part.limit,
                tell=tell,
            )
    session = list(islice(turns(path, encode, style), answers))
    session[0] = replace(session[0], before=[*encode(front), *session[0].before])
    policy = Fixed() if fixed else Gated(OraclePasses(part.passes), carry)
    expected = replay(session, policy, carry=carry, first=part.first)
    name = f"{style}, {kind}{', fixed lengths' if fixed else ''}, {part.front:,} tokens in front"
    share = totals.per_forward / max(1e-9, expected.per_forward)
    console.print(
        f"{name}: answers {part.first + 1} to {answers}, {totals.said:,} tokens, {totals.forwards:,} passes; "
        f"tokens a pass {totals.per_forward:.3f}; simulated {expected.said:,} tokens, {expected.forwards:,} passes, "
        f"{expected.per_forward:.3f}; share {share:.3f}",
        highlight=False,
    )


def served_unlike(tokenizer_folder: Path, kind: Kind, part: Part, tokens: int, console: Console) -> None:
    """An answer that never repeats, with drafts and without: each pass takes exactly what it should."""
    tokenizer, carry = drafted.tokenizer_for_oracle(tokenizer_folder), kind == "hybrid"

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    front, texts = filler(part.front, encode), [filler(tokens, encode, seed) for seed in (6, 7, 8)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        stack.enter_context(patch.dict(os.environ, {"ORACLE_LOG": str(work / "log.jsonl")}))
        checkpoint = build_oracle(work / "oracle", kind, tokenizer=tokenizer, layers=["A", "K"] if carry else ["K"])
        clock = VirtualClock(noise=0.0, launching=part.launching, waits=part.waits)
        url = stack.enter_context(drafted.serving(checkpoint, work, passes=part.passes, clock=clock))
        ask = partial(drafted.paced, url, work, work / "log.jsonl", front)
        ask(texts[0], drafts=True)  # what is done once is done here
        without, found = ask(texts[1], drafts=False), ask(texts[2], drafts=True)
    first = OraclePasses(part.passes).by_width(part.front)[1]
    computed = [1e6 * (one.seconds / one.tokens - first) for one in (without, found)]
    slower = found.seconds / found.tokens / (without.seconds / without.tokens)
    console.print(
        f"never repeats, {kind}, {part.front:,} tokens in front: {found.tokens} tokens, {found.passes} passes; "
        f"{1 / slower:.4f} of the speed without drafts; microseconds a token beside passes of {1e3 * first:.1f} ms: "
        f"{computed[1]:.0f} with drafts, {computed[0]:.0f} without",
        highlight=False,
    )


def filler(tokens: int, encode: Callable[[str], list[int]], seed: int = 5) -> str:
    """About so many tokens in which nothing is worth copying."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(tokens)]
    sample = words[:1000]
    return " ".join(words[: tokens * len(sample) // max(1, len(encode(" ".join(sample))))])


def edits(encode: Callable[[str], list[int]], tokens: int) -> tuple[list[int], list[int]]:
    """A prompt with a file, and so many tokens of an answer that edits it: old text, new text, a word between.

    The prompt's end is how that answer begins, so that the first token is one of old text.
    """
    code = SOURCE.read_text("utf-8")
    prompt = encode(
        f"<|im_start|>user\nRename what is hard to read in {SOURCE.name}:\n{code}<|im_end|>\n<|im_start|>assistant\n"
    )
    lines, said, at = code.splitlines(keepends=True), "", 20
    chance = random.Random(1)
    while len(encode(said)) < tokens + 100:
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
    begun, old_text, rest = said.partition("<parameter=oldText>\n")
    return prompt + encode(begun + old_text), encode(rest)[:tokens]


def unlike(vocab: int, tokens: int) -> tuple[list[int], list[int]]:
    """A prompt and an answer in which no token stands twice."""
    drawn = random.Random(2).sample(range(100, vocab), PROMPT + tokens)
    return drawn[:PROMPT], drawn[PROMPT:]


def misleading(vocab: int, tokens: int) -> tuple[list[int], list[int]]:
    """Runs of five tokens that stand in the prompt, each followed there by other tokens than in the answer."""
    chance = random.Random(3)
    drawn = chance.sample(range(100, vocab), PROMPT)
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


@dataclass(frozen=True)
class Case:
    """What so many rows say at the same time, each behind the same prompt."""

    prompt: list[int]
    said: list[int]
    rows: int = 1


class Saying:
    """One loop that says a recording, a slice at a time. What it computed ahead belongs to the slice that began it.

    Attributes:
        heard: tokens that each of its rows has said.
    """

    def __init__(
        self, runner: BatchRunner | ModelRunner, cache: list[Any], prompt: list[int], said: list[int], rows: int
    ) -> None:
        self.wall, self.cpu = list[float](), list[float]()
        self._runner = runner
        self._said = said
        self._first = 0
        self._heard: dict[int, int] = {}
        for _ in range(rows):
            index = SuffixIndex(prompt)
            self.drafts = RowDrafts(lambda index=index: index)  # type: ignore[misc]
            state = RowState(copy.deepcopy(cache), prompt[:-1], prompt[-1], NEVER, Recorded(said), drafts=self.drafts)
            self._heard[runner.insert(state)] = 0
        self.go_on(1)
        self._first = self.heard
        self.wall = []
        self.cpu = []

    @property
    def heard(self) -> int:
        return min(self._heard.values())

    def go_on(self, tokens: int) -> None:
        """Until each row has said so many in all; a draft may take it further."""
        wall, cpu = time.perf_counter(), time.process_time()
        while self.heard < tokens:
            for row in self._runner.decode():
                assert row.token == self._said[self._heard[row.uid]], "the recording was not said"
                self._heard[row.uid] += 1
        mx.synchronize(generation_stream)  # type: ignore[no-untyped-call]
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def pace(self, clock: Literal["wall", "cpu"]) -> float:
        """Seconds a token of each row."""
        return sum(self.wall if clock == "wall" else self.cpu) / (self.heard - self._first)


def side_by_side(
    model: Any, case: Case, gate: DraftGate, limit: float, tell: Callable[[str], None]
) -> dict[str, Saying]:
    """Three loops take turns, a slice each, until the time is over or all is said: a busy neighbour slows all alike."""
    prompt, said = case.prompt, case.said
    cache, loops = prefilled(model, prompt), dict[str, Saying]()
    for name in LOOPS:
        runner: BatchRunner | ModelRunner = BatchRunner(model, eos=[NEVER], max_rows=2)
        if name != TODAY:
            runner = ModelRunner(model, eos=[NEVER], max_rows=2, gate=gate if name == DRAFTING else None)
        loops[name] = Saying(runner, cache, prompt, said, case.rows)
    end, slices = time.perf_counter() + limit, range(1 + SLICE, len(said) - MOST_DRAFTED, SLICE)
    for number, tokens in enumerate(slices):
        if time.perf_counter() > end:
            break
        for turn in range(len(LOOPS)):
            loops[LOOPS[(number + turn) % len(LOOPS)]].go_on(tokens)
        tell(f"{tokens} tokens; seconds " + ", ".join(f"{name} {sum(one.wall):.1f}" for name, one in loops.items()))
    return loops


def compared(name: str, loops: dict[str, Saying]) -> list[str]:
    """A row of the table."""
    today, alone, drafting = (loops[name] for name in LOOPS)
    counts = drafting.drafts.counts
    return [
        name,
        *(f"{1e3 * one.pace('wall'):.0f} ({1e3 * one.pace('cpu'):.0f})" for one in loops.values()),
        f"{today.pace('wall') / drafting.pace('wall'):.3f} ({today.pace('cpu') / drafting.pace('cpu'):.3f})",
        "" if counts.drafted else f"{statistics.median(map(truediv, today.wall, drafting.wall)):.3f}",
        f"{alone.pace('wall') / drafting.pace('wall'):.3f} ({alone.pace('cpu') / drafting.pace('cpu'):.3f})",
        f"{drafting.heard / max(1, counts.forwards):.2f}",
        f"{counts.accepted} of {counts.drafted}",
    ]


def costs_table(costs: PassCosts) -> Table:
    table = Table("context", *map(str, WIDTHS))
    for context in (64, 4096, 32_000, 100_000, 200_000):
        table.add_row(f"{context:,}", *(f"{1e3 * costs.by_width(context)[width]:.0f}" for width in WIDTHS))
    return table


def tell(console: Console, name: str, line: str) -> None:
    console.print(f"{name}: {line}", highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--session", type=Path, default=None, help="a PI session; without one, 1. is left out")
    parser.add_argument("--served", nargs="*", choices=[f"{s}-{k}" for s in STYLES for k in KINDS], help="only 2.")
    parser.add_argument("--turns", type=int, default=None, help="with --session: only its first answers")
    parser.add_argument("--first", type=int, default=0, help="with --served: so many are there already")
    parser.add_argument(
        "--fixed", action="store_true", help="with --served: drafts of 3 or 31 tokens, without the gate"
    )
    parser.add_argument("--context", nargs="*", type=int, default=[0], help="with --served: tokens put in front")
    parser.add_argument("--passes", default=PASSES, help="with --served: what the oracle's passes take (ORACLE_PASS)")
    parser.add_argument("--launching", type=float, default=0.0, help="with --served: seconds of a launch")
    parser.add_argument("--waits", action="store_true", help="with --served: each pass is waited for at once")
    parser.add_argument("--limit", type=float, default=math.inf, help="with --served: seconds for each of them")
    parser.add_argument("--tokens", type=int, default=2000, help="the most that a case of 3. says")
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="about how long a case of 3. takes; edits twice that"
    )
    parser.add_argument("--case", default=None, help="only this one of 3.: edits, never repeats, misleads, two rows")
    parser.add_argument("--no-wall", action="store_true", help="leave 3. out")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console(width=150)
    cache = Path(load_settings(None).cache_dir)
    folder = ensure_embedded_model(cache, quantised=accelerator().backend != "cpu", progress=lambda *_: None)
    if options.served is not None and options.session is None:
        for kind, front in product(KINDS, options.context):
            part = Part(0, None, math.inf, front, options.passes, options.launching, options.waits)
            served_unlike(folder, kind, part, options.tokens, console)
        return 0
    if options.served is not None:
        for style, kind in product(STYLES, KINDS):
            if not options.served or f"{style}-{kind}" in options.served:
                for front in options.context:
                    limits = options.first, options.turns, options.limit
                    part = Part(*limits, front, options.passes, options.launching, options.waits)
                    served(options.session, folder, style, kind, part, options.fixed, console)
        return 0
    model, tokenizer, *_ = load(str(folder))

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    if options.session is not None:
        console.print(simulated(options.session, encode, options.turns))
    if options.no_wall:
        return 0
    costs = PassCosts()
    gate = DraftGate(costs)
    headings = ("today / drafts", "median of slices", "alone / drafts", "tokens a pass", "accepted")
    table = Table("milliseconds a token (CPU)", *LOOPS, *headings)
    cases = {
        "edits": Case(*edits(encode, options.tokens)),
        "never repeats": Case(*unlike(len(tokenizer), options.tokens)),
        "misleads": Case(*misleading(len(tokenizer), options.tokens)),
        "two rows": Case(*unlike(len(tokenizer), options.tokens), rows=2),
    }
    for name, case in cases.items():
        if options.case not in (None, name):
            continue
        limit = options.seconds * (2 if name == "edits" else 1)
        loops = side_by_side(model, case, gate, limit, partial(tell, console, name))
        table.add_row(*compared(name, loops))
    console.print(table)
    console.print("milliseconds of a pass by width, as observed")
    console.print(costs_table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
