"""A three-turn agent conversation with a server of its own, through the proxy if there is one; what each turn cost."""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from start_llm.app import App
from start_llm.cli.measure import Timed, timed
from start_llm.clients.agent import Endpoint
from start_llm.core.errors import StartLLMError
from start_llm.core.settings import Settings
from start_llm.dashboard.terminal import log_as_lines, make_console
from start_llm.launch.chat import ChatError
from start_llm.launch.conversation import Message

MAX_TOKENS = 48
PROXY_SECONDS = 120.0
ENOUGH = 0.95  # of what a turn resends must be reused

_TEXTS = tomllib.loads(Path(__file__).with_name("demo.toml").read_text("utf-8"))
SYSTEM: str = _TEXTS["system"]
TURNS: list[str] = _TEXTS["turns"]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": tool} for tool in _TEXTS["tools"]]


class DemoTurn(NamedTuple):
    """What one request cost. `resent`: tokens that the server had seen or made before."""

    found: Timed
    resent: int

    @property
    def reused(self) -> int:
        return self.found.prompt - self.found.computed

    @property
    def share(self) -> float:
        """Part of what was resent that was reused."""
        return min(1.0, self.reused / self.resent) if self.resent else 1.0


def main(settings: Settings, options: argparse.Namespace | None = None) -> int:
    """0 if both later turns reused what they resent; else 1, with the reason on standard error."""
    # Own ports, and no KV of earlier runs: the first turn is to be a cold one.
    settings = settings.model_copy(update={"mlx_port": 0, "proxy_port": 0, "kv_disk_dir": "off"})
    log_as_lines(settings.log_level)
    console = Console(highlight=False)
    app = App(settings, console=make_console(stderr=settings.log_json))
    try:
        app.start()
        if (proxy := app.proxy) is not None and not proxy.wait_ready(PROXY_SECONDS):
            print(f"The proxy did not get ready in {PROXY_SECONDS:.0f} s; see logs/proxy.log.", file=sys.stderr)
            return 1
        console.print(f"demo: {len(TURNS)} turns of a conversation ...")
        url, key = (app.url, settings.api_key or "none") if proxy is None else (proxy.url, proxy.master_key)
        card = app.service.models.cards()[0]
        turns = converse(Endpoint(url=url, key=key, model=card.id, context=card.context, answer=MAX_TOKENS))
    except (StartLLMError, ChatError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        app.stop()
    console.print(table(turns))
    poor = [number for number, turn in enumerate(turns, 1) if turn.share < ENOUGH]
    if poor:
        print(f"Turn {poor[0]} reused less than {ENOUGH:.0%} of what it resent.", file=sys.stderr)
    return 1 if poor else 0


def converse(endpoint: Endpoint) -> list[DemoTurn]:
    """Runs the conversation. Each turn resends the whole history, the way agents do."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    turns: list[DemoTurn] = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        # the tools are part of the prompt, as an agent's are; a small model would call them for no reason
        found = timed(endpoint, messages, MAX_TOKENS, tools=TOOLS, tool_choice="none")
        turns.append(DemoTurn(found, turns[-1].found.prompt + turns[-1].found.generated if turns else 0))
        messages.append(found.message)
    return turns


def table(turns: list[DemoTurn]) -> Table:
    shown = Table(title="What each turn cost, in tokens, and when its client had the first one")
    for heading in ("turn", "prompt", "resent", "reused", "computed", "first token"):
        shown.add_column(heading, justify="right")
    for number, turn in enumerate(turns, 1):
        reused = f"{turn.reused:,}" + (f" ({turn.share:.0%})" if turn.resent else "")
        numbers = f"{turn.found.prompt:,}", f"{turn.resent:,}", reused, f"{turn.found.computed:,}"
        shown.add_row(str(number), *numbers, f"{turn.found.first:.2f} s")
    return shown
