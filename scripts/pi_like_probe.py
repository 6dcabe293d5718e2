"""A PI-shaped agent against a live server: tools, tool results, a history that grows. Prints what each request reused.

    python3.12 install_and_run.py run scripts/pi_like_probe.py --url http://127.0.0.1:8080 --turns 4

Works with any model: where it calls no tool, the probe goes on with the next user message. Exits 1 if a request failed;
with `--check` also if less of a prompt was reused than `LEAST`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.agent import Style
from scripts.bench.client import Client, Reply
from scripts.bench.probing import add_server_options, client_of, reused, row_of
from scripts.bench.texts import Writer

MAX_CALLS = 4
LEAST = {2: 0.94, 3: 0.97}
"""Of the prompt of the second request, and of all later ones."""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser)
    parser.add_argument("--turns", type=int, default=4, help="user messages")
    parser.add_argument("--reasoning", choices=["strip", "echo", "doubled"], default="echo", help="how it is sent back")
    parser.add_argument("--arguments", choices=["as_is", "compact", "sorted", "object"], default="compact")
    parser.add_argument("--check", action="store_true", help="exit 1 if too little was reused")
    parser.add_argument("--lines", type=int, default=100, help="lines of the system prompt, about 25 tokens each")
    return parser.parse_args(argv)


def converse(client: Client, writer: Writer, style: Style, turns: int, lines: int, limit: int) -> list[Reply]:
    """Every request's reply; stops at the first that failed."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": writer.system(lines)}]
    tools, replies = writer.tools(), []
    for _ in range(turns):
        messages.append({"role": "user", "content": writer.task()})
        for _ in range(1 + MAX_CALLS):
            reply = client.ask({"messages": messages, "tools": tools, "max_tokens": limit})
            replies.append(reply)
            if reply.error:
                return replies
            messages.append(style.assistant(reply))
            if not reply.calls:
                break
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": writer.code(15)})
    return replies


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    style = Style(options.reasoning, options.arguments)
    writer = Writer(options.seed)
    replies = converse(client_of(options), writer, style, options.turns, options.lines, options.max_tokens)
    table = Table(title=f"PI-like agent, reasoning {style.reasoning}, arguments {style.arguments}")
    for heading in ("request", "prompt", "reused", "share", "computed", "new", "first token (ms)", "why"):
        table.add_column(heading, justify="right")
    for number, reply in enumerate(replies):
        table.add_row(str(number + 1), *row_of(reply))
    Console().print(table)
    later = [reused(reply) for reply in replies[1:]]
    if later:
        print(f"reused after the first request: {sum(later) / len(later):.1%} on average, {min(later):.1%} at worst")
    poor = [n for n, share in enumerate(later, 2) if share < LEAST[min(n, 3)]] if options.check else []
    if poor:
        print(f"too little was reused in request {', '.join(map(str, poor))}")
    return int(bool(poor) or any(reply.error for reply in replies))


if __name__ == "__main__":
    sys.exit(main())
