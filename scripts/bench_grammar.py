"""What a grammar costs per token: decoding with and without one, on the same model, in short rounds that alternate.

    python3.12 install_and_run.py run scripts/bench_grammar.py [--model FOLDER] [--rows 1]
        [--constrained 1] [--rounds 16] [--steps 6]

Two generators decode the same prompt greedily, one without any processor and one under a grammar: JSON of a schema,
any JSON object, a forced tool call, free text beside a strict tool. They take turns, a round of a few steps each, so
that whatever else the machine does hits both alike. A round ends when the device has finished what was launched:
otherwise one side would pay for what the other left running. Each pair of rounds gives one difference; the table shows
medians, of wall time and of the CPU time of the whole process (which waiting for other programs does not change). The
first line sets two free generators against each other: that is what the measurement itself is good for. `processor` is
what the processor takes per token with no model behind it, fed the same tokens again.

Then one row decodes in our own loop: free text, JSON of the schema, and the same JSON where tokens that the grammar
leaves no choice about are verified in blocks (`DRAFTS=auto`), in turns. `--forced-only` prints that alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_drafts import prefilled
from start_llm.core.messages import Tool
from start_llm.core.request import ChatRequest, ResponseFormat, ToolChoice
from start_llm.core.settings import load_settings
from start_llm.core.work import Constraint
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.gate import DraftGate, PassCosts
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.row import RowState
from start_llm.engine.decode.sampling import Processor
from start_llm.models.embedded import ensure_embedded_model
from start_llm.parsing.structured import ModelText, make_constraint, special_tokens

PROMPT = "Describe ten cities, each with its name, population, tags and a long description."
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "population": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["old", "big", "coastal"]}},
        "description": {"type": "string"},
    },
    "required": ["name", "population", "tags", "description"],
    "additionalProperties": False,
}
CITIES: dict[str, Any] = {"type": "object", "properties": {"cities": {"type": "array", "items": CITY, "minItems": 10}}}
CITIES |= {"required": ["cities"], "additionalProperties": False}
TOOL = Tool("save_cities", "Saves cities.", CITIES, strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the embedded SmolLM2, float32")
    parser.add_argument("--rows", type=int, default=1, help="requests in the batch")
    parser.add_argument("--constrained", type=int, default=1, help="how many of them have the grammar")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of each generator per case")
    parser.add_argument("--steps", type=int, default=6, help="tokens per round")
    parser.add_argument("--tokens", type=int, default=120, help="of the answers with and without forced tokens")
    parser.add_argument("--forced-only", action="store_true", help="leave the first table out")
    options = parser.parse_args(arguments)
    folder = options.model or ensure_embedded_model(
        load_settings().cache_dir, quantised=False, progress=lambda stage, part: None
    )
    model, tokenizer, *_ = load(str(folder))
    start = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.eos_token_ids)
    print(f"vocabulary for llguidance: {time.perf_counter() - start:.2f} s")
    cases = constraints(ModelText("hermes_json", special_tokens(tokenizer)))
    for name, constraint in cases.items():
        start = time.perf_counter()
        if constraint is not None:
            grammars.prepare(constraint)
            print(f"compiling {name}: {1e3 * (time.perf_counter() - start):.1f} ms")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    ends = tokenizer.eos_token_ids
    if not options.forced_only:
        per_token(model, grammars, prompt, cases, ends, options)
    schema = cases["json_schema"]
    assert schema is not None
    forced_tokens(model, grammars, prompt, schema, ends, options)
    return 0


def per_token(
    model: Any,
    grammars: Grammars,
    prompt: Sequence[int],
    cases: dict[str, Constraint | None],
    eos: Collection[int],
    options: argparse.Namespace,
) -> None:
    print(f"\n{options.rows} rows, {options.constrained} with the grammar; milliseconds per step, medians\n")
    print(f"{'':14}{'free wall':>10}{'over':>9}{'':9}{'free CPU':>10}{'over':>9}{'':9}{'processor':>14}{'rounds':>8}")
    for name, constraint in cases.items():
        free, bound = measure(model, grammars, prompt, constraint, options)
        own, ends = 0.0, eos if constraint is not None else ()
        if constraint is not None:
            own = replay(grammars, constraint, bound.tokens, model.args.vocab_size)
        report(name, free, bound, own, whole_rounds(bound.tokens, ends, options))


def forced_tokens(
    model: Any,
    grammars: Grammars,
    prompt: Sequence[int],
    schema: Constraint,
    ends: Collection[int],
    options: argparse.Namespace,
) -> None:
    """Milliseconds a token of one row, in answers of the same length."""
    costs = PassCosts()
    cache = prefilled(model, list(prompt))
    ways: dict[str, list[float]] = {"free": [], "schema": [], "schema, forced": []}
    said: dict[str, list[int]] = {}
    passes: dict[str, int] = {}
    for _ in range(options.rounds // 3 + 1):
        for name, found in ways.items():
            gate = DraftGate(costs) if "forced" in name else None
            runner = ModelRunner(model, eos=ends, max_rows=1, gate=gate)
            drafts = RowDrafts(lambda: None)
            runner.insert(
                RowState(
                    copy.deepcopy(cache),
                    list(prompt[:-1]),
                    prompt[-1],
                    options.tokens,
                    sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
                    processors=[] if name == "free" else [grammars.processor(schema)],
                    drafts=drafts,
                )
            )
            tokens, began, finished = list[int](), 0.0, False
            while not finished:
                rows = runner.decode()
                began = began or time.perf_counter()
                tokens += [row.token for row in rows]
                finished = any(row.finish for row in rows)
            found.append((time.perf_counter() - began) / len(tokens))
            said[name], passes[name] = tokens, drafts.counts.forwards
    assert said["schema"] == said["schema, forced"], "forced tokens changed what is said"
    print(f"\none row alone, up to {options.tokens} tokens; medians\n")
    print(f"{'':16}{'ms a token':>12}{'passes':>8}{'tokens':>8}")
    for name, found in ways.items():
        print(f"{name:16}{1e3 * median(found):12.2f}{passes[name]:8}{len(said[name]):8}")
    ratios = [a / b for a, b in zip(ways["free"], ways["schema, forced"], strict=True)]
    print(f"the schema's answer with forced tokens against free text: {median(ratios):.2f} times as fast", flush=True)


def constraints(text: ModelText) -> dict[str, Constraint | None]:
    def of(**fields: Any) -> Constraint | None:
        return make_constraint(ChatRequest(id="bench", dialect="chat", model="bench", **fields), text)

    return {
        "free": None,
        "json_schema": of(response_format=ResponseFormat("json_schema", CITIES)),
        "json_object": of(response_format=ResponseFormat("json_object")),
        "forced call": of(tools=(TOOL,), tool_choice=ToolChoice("required")),
        "auto, strict": of(tools=(TOOL,)),
    }


class Side:
    """One of the two generators, and the seconds per step that each of its rounds took."""

    def __init__(
        self, model: Any, prompt: Sequence[int], processors: Sequence[Sequence[Processor]], max_tokens: int
    ) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.tokens: list[int] = []
        self._generator = BatchGenerator(model)
        rows = len(processors)
        self._uids = self._generator.insert(
            [list(prompt)] * rows, max_tokens=[max_tokens] * rows, logits_processors=[list(p) for p in processors]
        )
        while not self.tokens:  # prefill and the first token, which are not counted
            self._step()
        mx.synchronize(self._generator.stream)

    def _step(self) -> None:
        self.tokens += [r.token for r in self._generator.next()[1] if r.uid == self._uids[0]]

    def round(self, steps: int) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        mx.synchronize(self._generator.stream)
        self.wall.append((time.perf_counter() - wall) / steps)
        self.cpu.append((time.process_time() - cpu) / steps)


def measure(
    model: Any, grammars: Grammars, prompt: Sequence[int], constraint: Constraint | None, options: argparse.Namespace
) -> tuple[Side, Side]:
    """(free, constrained); the first rows of the constrained one have the grammar."""
    sides = []
    for grammar in (None, constraint):
        processors: list[list[Processor]] = [[] for _ in range(options.rows)]
        if grammar is not None:
            processors[: options.constrained] = [[grammars.processor(grammar)] for _ in range(options.constrained)]
        sides.append(Side(model, prompt, processors, options.rounds * options.steps + 2))
    free, bound = sides
    for turn in range(options.rounds):
        for side in (free, bound) if turn % 2 else (bound, free):
            side.round(options.steps)
    return free, bound


def report(name: str, free: Side, bound: Side, own: float, rounds: int) -> None:
    columns = []
    for one, other in ((free.wall, bound.wall), (free.cpu, bound.cpu)):
        more = [b - a for a, b in zip(one[:rounds], other[:rounds], strict=True)]
        part = 100 * median(more) / median(one[:rounds])
        columns.append(f"{1e3 * median(one[:rounds]):10.2f}{1e3 * median(more):+9.2f}{part:+8.1f}%")
    print(f"{name:14}{''.join(columns)}{1e3 * own:14.3f}{rounds:8}", flush=True)


def whole_rounds(tokens: Sequence[int], ends: Collection[int], options: argparse.Namespace) -> int:
    """Rounds before the answer's end; after it nothing is left to constrain."""
    rounds: int = options.rounds
    steps = next((i for i, token in enumerate(tokens[1:]) if token in ends), rounds * options.steps)
    return max(1, min(rounds, steps // int(options.steps)))


def replay(grammars: Grammars, constraint: Constraint, tokens: Sequence[int], vocab: int) -> float:
    """Seconds per token of the processor alone."""
    processor, logits = grammars.processor(constraint), mx.zeros((1, vocab))
    history = [mx.array([token], dtype=mx.int32) for token in (0, *tokens)]
    mx.eval(history, logits)
    start = time.perf_counter()
    for newest in history:
        mx.eval(processor(newest, logits))
    return (time.perf_counter() - start) / len(history)


if __name__ == "__main__":
    sys.exit(main())
