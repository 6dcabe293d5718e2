"""What it costs to turn generated tokens into events: microseconds of CPU time per token, by what the model writes.

    python3.12 install_and_run.py run scripts/bench_parsing.py
    python3.12 install_and_run.py run scripts/bench_parsing.py --tokens 20000 --out parsing.json

A token is a piece of about four characters here. Each figure is the quickest of several runs, so that other programs on
the machine do not count. A decode step takes 10,000 microseconds and more, so tens do not matter and hundreds would.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.texts import Writer
from start_llm.core.messages import Tool
from start_llm.parsing.registry import OutputStyle, output_style
from start_llm.parsing.stream import OutputParser

ROUNDS = 5
PIECE = 4
WRITE = Tool(
    "write",
    "Write a file",
    {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
)


@dataclass(frozen=True)
class Case:
    """`pieces` are the model's; `inside` says that the prompt opened the reasoning block."""

    name: str
    style: OutputStyle
    pieces: Sequence[str]
    stop: tuple[str, ...] = ()
    inside: bool = False


def _cut(text: str) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def _file(tokens: int) -> str:
    """Code with quotes, angles and braces, as agents write it."""
    line = (
        'def item_{0}(rows: list[str]) -> dict[str, int]:\n    return {{"a": len(rows) < {0}, \'b\': "</b>\\n"}}\n\n\n'
    )
    lines: list[str] = []
    while sum(map(len, lines)) < tokens * PIECE:
        lines.append(line.format(len(lines)))
    return "".join(lines)[: tokens * PIECE]


def cases(tokens: int) -> list[Case]:
    def style(tools: str, reasoning: str = "think_tag") -> OutputStyle:
        return output_style(tool_parser=tools, reasoning_parser=reasoning)

    prose, code = "", _file(tokens)
    writer = Writer("parsing")
    while len(prose) < tokens * PIECE:
        prose += writer.prose(20) + "\n\n"
    arguments = json.dumps({"path": "a.py", "content": code})
    qwen = f"<parameter=path>\na.py\n</parameter>\n<parameter=content>\n{code}\n</parameter>\n"
    glm = f"<arg_key>path</arg_key><arg_value>a.py</arg_value><arg_key>content</arg_key><arg_value>{code}</arg_value>"
    channel = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
    texts = {
        "hermes_json": f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function=write>\n{qwen}</function>\n</tool_call>",
        "glm47": f"<tool_call>write\n{glm}</tool_call>",
        "mistral": f"[TOOL_CALLS]write[ARGS]{arguments}",
    }
    calls = [Case(f"call, {ident}", style(ident), _cut(text)) for ident, text in texts.items()]
    return [
        Case("prose", style("hermes_json"), _cut(prose)),
        Case("prose, two stop strings", style("hermes_json"), _cut(prose), stop=("\nUser:", "END OF ANSWER")),
        Case("reasoning", style("hermes_json"), _cut(prose), inside=True),
        Case("code in a fence", style("hermes_json"), _cut(f"```python\n{code}\n```")),
        *calls,
        Case("call, harmony", style("harmony", "harmony"), _cut(channel + arguments)),
    ]


def measure(case: Case) -> float:
    """Microseconds per token."""
    best = float("inf")
    for _ in range(ROUNDS):
        parser = OutputParser(case.style, tools=(WRITE,), stop=case.stop, in_reasoning=case.inside)
        started = time.process_time()
        for piece in case.pieces:
            parser.feed(piece)
        parser.finish()
        best = min(best, time.process_time() - started)
    return best / len(case.pieces) * 1e6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=5000, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args(argv)
    figures = {case.name: measure(case) for case in cases(options.tokens)}
    table = Table(title=f"Parsing, CPU microseconds per token ({options.tokens:,} tokens)")
    table.add_column("the model writes")
    table.add_column("µs", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.1f}")
    Console(width=100).print(table)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
