"""The command `bench`: how quick this machine is with a model; beside another server if asked."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from start_llm.cli.measure import Timed, about, own_server, timed, words
from start_llm.clients.agent import Endpoint
from start_llm.core.settings import Settings
from start_llm.host.ports import ask_json, free_port
from start_llm.host.processes import wait_until
from start_llm.launch.chat import ChatError
from start_llm.launch.conversation import Message
from start_llm.models.catalog import folder_of

LENGTHS = (1_024, 8_192, 32_768)
ANSWER, LEAST_ANSWER = 64, 8  # tokens
ANSWER_SECONDS = 6.0  # answers are shorter where 64 tokens would take longer
TURNS = 10
HEAD, TOOL = 3_000, 200  # words of an agent's instructions, and of what a tool says in each turn
HEAD_SECONDS = 20.0  # to read these instructions: they are shorter on a slow machine
BUDGET_SECONDS = 60.0  # for a length: what would take longer is left out, and said
START_SECONDS = 600.0
Rows = dict[str, str]


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Prints a table, and the same as text to paste. Raises StartLLMError, ChatError: a server fails."""
    with tempfile.TemporaryDirectory(prefix="start-llm-bench-") as folder:
        model, columns = measure(settings, Path(folder), options.against)
    print("\nThis text can be pasted into a report:\n")
    print("\n".join([*about(model), "", *table(columns)]))
    return 0


def measure(settings: Settings, folder: Path, against: str | None) -> tuple[str, dict[str, Rows]]:
    """The model's name, and a column of rows for each server."""
    disk, began = str(folder / "kv"), time.perf_counter()
    with own_server(settings, folder, kv_disk_dir=disk) as (app, endpoint):
        loaded = time.perf_counter() - began
        ours, most = rows_of(endpoint, answer := answer_of(endpoint))
        ours["from the start until it answers"] = f"{loaded:.1f} s"
        talk = Agent("restart", endpoint, most, answer)
        for _ in range(2):  # a single short request may be a title's: its KV is not worth a file
            talk.turn(endpoint)
        source = app.pool.main_runtime.loaded.folder if app.pool.main_runtime is not None else None
    with own_server(settings, folder, kv_disk_dir=disk) as (_, again):
        ours["first token after a restart"] = seconds_of(talk.turn(again))
    columns = {"start_llm": ours}
    if against is not None:
        path = folder_of(settings.model_path) if settings.model_path else source
        with mlx_lm_server(str(path or settings.model_path), folder) as other:
            answer_of(other)
            columns[against], _ = rows_of(other, answer, most)
    return endpoint.model, columns


def answer_of(endpoint: Endpoint) -> int:
    """How many tokens the answers have. Kernels are compiled at their first use, which is here."""
    found = timed(endpoint, [{"role": "user", "content": words(64, "warm up")}], LEAST_ANSWER)
    return max(LEAST_ANSWER, min(ANSWER, int(found.decode * ANSWER_SECONDS)))


def rows_of(endpoint: Endpoint, answer: int, most: int = 0) -> tuple[Rows, int]:
    """What one server takes, and how many words its agent's instructions had: at most `most`, if that is given.

    What it has in its KV from one row is of no use to the next. `answer`: tokens.
    """
    rows: Rows = {}
    rate = 0.0
    for length in LENGTHS:
        name = f"{length // 1024}k"
        is_long, is_slow = length + answer > endpoint.context, bool(rate) and length / rate > BUDGET_SECONDS
        if is_long or is_slow:
            why = f"context {endpoint.context:,}" if is_long else f"about {length / rate:.0f} s"
            rows[f"prefill at {name}, tokens/s"] = f"- ({why})"
            continue
        asked: list[Message] = [{"role": "user", "content": words(int(length * 0.95), length)}]
        found, again = timed(endpoint, asked, answer), timed(endpoint, asked, 4)
        rate = found.prefill
        rows[f"prefill at {name}, tokens/s"] = f"{found.prefill:,.0f}"
        rows[f"decode at {name}, tokens/s"] = f"{found.decode:,.1f}"
        rows[f"first token at {name}"] = seconds_of(found)
        rows[f"first token at {name}, asked again"] = seconds_of(again)
        say(endpoint, f"{name}: {found.prefill:,.0f} tokens/s prefill, {found.decode:,.1f} decode")
    agent = Agent(0, endpoint, most or int(rate * HEAD_SECONDS) or HEAD, answer)
    turns = []
    for number in range(1, TURNS + 1):
        turns.append(agent.turn(endpoint))
        say(endpoint, f"turn {number}: {seconds_of(turns[-1])}")
    if rate:
        say(endpoint, f"turn {TURNS} with nothing stored: about {turns[-1].prompt / rate:.0f} s ...")
    head: Message = {"role": "system", "content": words(agent.head_words, "other")}
    cold = timed(endpoint, [head, *agent.messages[1:-1]], answer)
    rows["first token of an agent's turn 1"] = seconds_of(turns[0])
    rows[f"first token of turn {TURNS}"] = seconds_of(turns[-1])
    rows[f"the same turn {TURNS} with nothing stored"] = seconds_of(cold)
    return rows, agent.head_words


class Agent:
    """A conversation that sends all of its history again in each turn; shorter where the context is short."""

    def __init__(self, seed: object, endpoint: Endpoint, most: int, answer: int) -> None:
        self.head_words = max(100, min(HEAD, endpoint.context // 4, most))
        self._answer = min(answer, endpoint.context // 128)
        self._seed, self._tool = seed, min(TOOL, endpoint.context // 64, self.head_words // 8)
        self.messages: list[Message] = [{"role": "system", "content": words(self.head_words, f"head {seed}")}]

    def turn(self, endpoint: Endpoint) -> Timed:
        """Asks once more, with something new."""
        text = f"The tool says: {words(self._tool, f'{self._seed} {len(self.messages)}')}. Go on."
        self.messages.append({"role": "user", "content": text})
        found = timed(endpoint, self.messages, self._answer)
        self.messages.append(found.message)
        return found


def say(endpoint: Endpoint, text: str) -> None:
    print(f"{endpoint.url}  {text}", file=sys.stderr, flush=True)


def seconds_of(found: Timed) -> str:
    return f"{found.first:.2f} s ({found.computed:,} of {found.prompt:,} tokens computed)"


@contextmanager
def mlx_lm_server(model: str, folder: Path) -> Iterator[Endpoint]:
    """mlx-lm's own server on the same files. Raises ChatError if it does not come up."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)]
    with (folder / "mlx_lm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        if not wait_until(lambda: process.poll() is not None or ask_json(f"{url}/v1/models")[0] == 200, START_SECONDS):
            raise ChatError(f"mlx_lm.server did not answer in {START_SECONDS:.0f} s")
        if process.poll() is not None:
            raise ChatError(f"mlx_lm.server ended: {(folder / 'mlx_lm.log').read_text(errors='replace')[-500:]}")
        yield Endpoint(url=url, key="none", model="default_model", context=1 << 20, answer=ANSWER)
    finally:
        process.terminate()
        process.wait()


def table(columns: dict[str, Rows]) -> list[str]:
    """As Markdown, a line each."""
    names = list(columns)
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    lines += [f"| {row} | {' | '.join(columns[name].get(row, '-') for name in names)} |" for row in rows]
    return [*lines, "", f"measured {time.strftime('%Y-%m-%d %H:%M')}, answers of at most {ANSWER} tokens, greedy"]
