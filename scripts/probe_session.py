"""Six questions to a live server's cache: does an append, a drift, a rewording, an insertion cost what is new in it?

    python3.12 install_and_run.py run scripts/probe_session.py --url http://127.0.0.1:8080

- normal: the conversation grows by one exchange.
- clock: a line of the system text tells the time, nothing else changes.
- reminder: a billing line and a reminder change, as Claude Code has them; the conversation has a session_id.
- message id: an id in the first message changes, as OpenClaw has it; the conversation has a session_id.
- semantic: old assistant turns come back trimmed, and without their reasoning.
- insert: a message is put into the middle; all before it should be reused.

Exits 1 if one of them reused less than it should. The answers of a conversation must have more than 64 tokens together:
fewer prove nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.agent import Style
from scripts.bench.client import Client, Reply
from scripts.bench.drifts import Billing, Clock, MessageId, Reminder
from scripts.bench.probing import add_server_options, client_of, reused, row_of
from scripts.bench.texts import Writer

Json = dict[str, Any]


@dataclass
class Probe:
    """One scenario's last reply and the share of its prompt that should have been reused."""

    name: str
    reply: Reply
    wanted: float

    @property
    def passed(self) -> bool:
        return self.reply.error is None and reused(self.reply) >= self.wanted


class Prober:
    """Makes a conversation of its own for every scenario."""

    def __init__(self, client: Client, seed: str, max_tokens: int) -> None:
        self.client = client
        self.seed = seed
        self.max_tokens = max_tokens

    def _ask(self, messages: list[Json], **more: str) -> Reply:
        return self.client.ask({"messages": messages, "max_tokens": self.max_tokens, **more})

    def _start(self, name: str, exchanges: int = 3) -> tuple[Writer, list[Json]]:
        writer = Writer(f"{self.seed}-{name}")
        messages: list[Json] = [{"role": "system", "content": writer.system()}]
        for _ in range(exchanges):
            messages.append({"role": "user", "content": writer.task(8)})
            messages.append(Style("echo").assistant(self._ask(messages)))
        return writer, messages

    def normal(self) -> Probe:
        writer, messages = self._start("normal")
        return Probe("normal", self._ask([*messages, {"role": "user", "content": writer.task()}]), 0.9)

    def clock(self) -> Probe:
        return self._drifting("clock", [Clock()])

    def reminder(self) -> Probe:
        return self._drifting("reminder", [Billing(), Reminder()], session_id=f"{self.seed}-reminder")

    def message_id(self) -> Probe:
        return self._drifting("message id", [MessageId()], session_id=f"{self.seed}-message-id")

    def _drifting(self, name: str, drifts: list[Clock | Billing | Reminder | MessageId], **more: str) -> Probe:
        writer, messages = self._start(name, exchanges=0)
        messages[0]["content"] = f"{drifts[0].shows}\n\n{messages[0]['content']}".lstrip()
        reply = Reply()
        for number in range(4):
            messages.append({"role": "user", "content": writer.task()})
            sent = messages
            for drift in drifts:
                sent = drift.apply(sent, number)
            reply = self._ask(sent, **more)
            messages.append(Style("echo").assistant(reply))
        return Probe(name, reply, 0.8)

    def semantic(self) -> Probe:
        writer, messages = self._start("semantic")
        turns = [dict(message) for message in messages]
        for turn in turns:
            if turn["role"] == "assistant":
                turn.pop("reasoning_content", None)
                turn["content"] = (turn["content"] or "").strip()
        return Probe("semantic", self._ask([*turns, {"role": "user", "content": writer.task()}]), 0.9)

    def insert(self) -> Probe:
        writer, messages = self._start("insert")
        messages.insert(5, {"role": "user", "content": f"(A note: {writer.sentence()})"})
        return Probe("insert", self._ask([*messages, {"role": "user", "content": writer.task()}]), 0.5)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser)
    options = parser.parse_args(argv)
    prober = Prober(client_of(options), options.seed, options.max_tokens)
    table = Table(title="Cache probe: the last request of each scenario")
    for heading in ("scenario", "verdict", "prompt", "reused", "share", "computed", "new", "first token (ms)", "why"):
        table.add_column(heading)
    scenarios = (
        *(prober.normal, prober.clock, prober.reminder, prober.message_id),
        *(prober.semantic, prober.insert),
    )
    probes = [scenario() for scenario in scenarios]
    for probe in probes:
        table.add_row(probe.name, "ok" if probe.passed else f"below {probe.wanted:.0%}", *row_of(probe.reply))
    Console().print(table)
    return int(not all(probe.passed for probe in probes))


if __name__ == "__main__":
    sys.exit(main())
