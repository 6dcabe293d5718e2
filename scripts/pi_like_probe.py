"""A PI-shaped agent against a live server: tools, tool results, a history that grows. Prints what each request reused.

    python3.12 install_and_run.py run scripts/pi_like_probe.py --url http://127.0.0.1:8080 --turns 4

Works with any model: where it calls no tool, the probe goes on with the next user message. With `--image` the first
user message shows a picture. Exits 1 if a request failed, or if less of a prompt was reused than `LEAST` (94% of the
second one, 97% of later ones), unless `--no-check` is given.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.agent import Style
from scripts.bench.client import Client, Reply
from scripts.bench.probing import add_server_options, client_of, reused, row_of
from scripts.bench.texts import Writer

MAX_CALLS = 4
LEAST = {2: 0.94, 3: 0.97}
"""Of the prompt of the second request, and of all later ones. With a short system prompt no server can reach it."""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser)
    parser.add_argument("--turns", type=int, default=4, help="user messages")
    parser.add_argument("--reasoning", choices=["strip", "echo", "doubled"], default="echo", help="how it is sent back")
    parser.add_argument("--arguments", choices=["as_is", "compact", "sorted", "object"], default="compact")
    parser.add_argument("--image", action="store_true", help="the first user message shows a picture")
    parser.add_argument("--no-check", action="store_true", help="exit 0 however little was reused")
    parser.add_argument("--lines", type=int, default=300, help="lines of the system prompt, about 25 tokens each")
    return parser.parse_args(argv)


def picture(seed: str) -> dict[str, Any]:
    """A part of a message: a picture of one colour, another one for each seed."""
    file = io.BytesIO()
    red, green, blue = random.Random(seed).randbytes(3)
    Image.new("RGB", (256, 256), (red, green, blue)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def converse(client: Client, writer: Writer, style: Style, options: argparse.Namespace) -> list[Reply]:
    """Every request's reply; stops at the first that failed."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": writer.system(options.lines)}]
    tools, replies = writer.tools(), []
    for turn in range(options.turns):
        shown = [picture(options.seed)] if options.image and not turn else []
        said = writer.task()
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": said}] if shown else said})
        for _ in range(1 + MAX_CALLS):
            reply = client.ask({"messages": messages, "tools": tools, "max_tokens": options.max_tokens})
            replies.append(reply)
            if reply.error:
                return replies
            messages.append(style.assistant(reply))
            if not reply.calls:
                break
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": writer.code(6)})
    return replies


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    style = Style(options.reasoning, options.arguments)
    writer = Writer(options.seed)
    replies = converse(client_of(options), writer, style, options)
    table = Table(title=f"PI-like agent, reasoning {style.reasoning}, arguments {style.arguments}")
    for heading in ("request", "prompt", "reused", "share", "computed", "new", "first token (ms)", "why"):
        table.add_column(heading, justify="right")
    for number, reply in enumerate(replies):
        table.add_row(str(number + 1), *row_of(reply))
    Console().print(table)
    later = [reused(reply) for reply in replies[1:]]
    if later:
        print(f"reused after the first request: {sum(later) / len(later):.1%} on average, {min(later):.1%} at worst")
    poor = [n for n, share in enumerate(later, 2) if share < LEAST[min(n, 3)]]
    if poor:
        print(f"too little was reused in request {', '.join(map(str, poor))}")
    return int(bool(poor and not options.no_check) or any(reply.error for reply in replies))


if __name__ == "__main__":
    sys.exit(main())
