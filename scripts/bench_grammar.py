"""What a grammar costs per token: decoding with and without one, on the same model, in the same run.

    python scripts/bench_grammar.py [--model FOLDER] [--tokens 96] [--rounds 5] [--rows 1]

The free run decodes greedily without any processor, the others under a grammar: JSON of a schema, any JSON object, a
forced tool call, and free text beside a strict tool. Rounds are interleaved, so that a busy machine slows all alike.
`processor` is what the processor itself takes per token, measured by feeding it the same tokens again with no model
behind it; beside a model most of that runs while the forward pass does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

from start_llm.core.messages import Tool
from start_llm.core.request import ChatRequest, ResponseFormat, ToolChoice
from start_llm.core.settings import load_settings
from start_llm.core.work import Constraint
from start_llm.engine.constraint import Grammars
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
    parser.add_argument("--tokens", type=int, default=96, help="tokens per run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="requests in the batch, all alike")
    options = parser.parse_args(arguments)
    folder = options.model or ensure_embedded_model(
        load_settings().cache_dir, quantised=False, progress=lambda stage, part: None
    )
    model, tokenizer, *_ = load(str(folder))
    start = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.eos_token_ids)
    print(f"vocabulary for llguidance: {time.perf_counter() - start:.2f} s")
    cases = constraints(ModelText("hermes_json", special_tokens(tokenizer), None))
    for name, constraint in cases.items():
        start = time.perf_counter()
        if constraint is not None:
            grammars.prepare(constraint)
            print(f"compiling {name}: {1e3 * (time.perf_counter() - start):.1f} ms")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    measure(model, grammars, prompt, cases, options)
    return 0


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


def measure(model: Any, grammars: Grammars, prompt: Sequence[int], cases: Any, options: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    own: dict[str, float] = dict.fromkeys(cases, 0.0)
    for turn in range(options.rounds + 1):  # the first warms up
        for name, constraint in cases.items():
            spent, tokens = decode(model, grammars, prompt, constraint, options)
            if turn > 0:
                seconds[name].append(spent)
            if constraint is not None and turn == options.rounds:
                own[name] = replay(grammars, constraint, tokens, model.args.vocab_size)
    free = median(seconds["free"])
    print(f"\n{'':14}{'ms/step':>9}{'over free':>11}{'processor ms':>14}   ({options.rows} rows)")
    for name, each in seconds.items():
        over = 100 * (median(each) / free - 1)
        print(f"{name:14}{1e3 * median(each):9.2f}{over:+10.1f}%{1e3 * own[name]:14.3f}")


def decode(
    model: Any, grammars: Grammars, prompt: Sequence[int], constraint: Constraint | None, options: argparse.Namespace
) -> tuple[float, list[int]]:
    """(seconds per step without prefill and first token, tokens of the first row)."""
    rows = options.rows
    generator = BatchGenerator(model)
    processors = [[] if constraint is None else [grammars.processor(constraint)] for _ in range(rows)]
    uids = generator.insert([list(prompt)] * rows, max_tokens=[options.tokens] * rows, logits_processors=processors)
    tokens: list[int] = []
    done, start = 0, 0.0
    while done < rows:
        responses = generator.next()[1]
        if responses and not tokens:
            start = time.perf_counter()
        tokens += [r.token for r in responses if r.uid == uids[0]]
        done += sum(r.finish_reason is not None for r in responses)
    return (time.perf_counter() - start) / (len(tokens) - 1), tokens


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
