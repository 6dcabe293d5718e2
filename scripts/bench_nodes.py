"""Several nodes behind the real LiteLLM: what is computed, against one node; other ways to share requests beside it.

The nodes are servers of their own on the oracle, which counts what it computes. The work: conversations of a few system
texts, with sub-agents (their own system text, a few turns) and fresh starts (the same system text, a new task).

    python3.12 install_and_run.py run scripts/bench_nodes.py                         # 12 conversations of 8 turns
    python3.12 install_and_run.py run scripts/bench_nodes.py --dialect messages --proxies 2
    python3.12 install_and_run.py run scripts/bench_nodes.py --only affinity smg     # what others do
    python3.12 install_and_run.py run scripts/bench_nodes.py --kills 50              # nodes are killed meanwhile

Columns: computed prompt tokens / one node's; requests and computed tokens of the busiest node / the mean; what choosing
a node took. `one`, `robin` (in turn) and `hash` (of system text and first message) ask the nodes without a proxy;
`nodes` is this project's proxy. `affinity` is LiteLLM's own for sessions: each conversation names itself to it. `smg`
is SGLang's gateway (`pip install smg`), where it is in PATH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.node_processes import KEY, NodeProcess, all_computed, node_processes, proxies, session_affinity, smg
from start_llm.proxy.fleet import NODE_HEADER

ANSWER_SECONDS = 300.0
MOST_AFTERWARDS = 1.15  # computed / one node, after nodes were killed
WAYS = ("robin", "hash", "nodes", "affinity", "smg")
SYSTEM_WORDS, MESSAGE_WORDS = 700, 60
WORDS = ("file", "test", "module", "cache", "token", "server", "request", "branch", "option", "value", "path", "buffer")


# --- the work -----------------------------------------------------------------------------------


@dataclass
class Conversation:
    """One agent's: its messages so far, as (role, text)."""

    system: str
    turns: list[str]  # what the user says, in order
    begins: int = 0  # the round of its first turn
    name: str = ""  # that a client could give it
    messages: list[tuple[str, str]] = field(default_factory=list)


def words(random_: random.Random, count: int) -> str:
    return " ".join(random_.choice(WORDS) + str(random_.randrange(100)) for _ in range(count))


def workload(label: str, conversations: int, systems: int, turns: int, seed: int = 1) -> list[Conversation]:
    """The same for each label, but with nothing in common with another label's."""
    dice = random.Random(seed)
    texts = [f"{label} {number}. {words(dice, SYSTEM_WORDS)}" for number in range(systems)]
    agents = [f"{label} agent {number}. {words(dice, SYSTEM_WORDS // 2)}" for number in range(systems)]
    made = []
    for number in range(conversations):
        kind = number % systems
        says = [words(dice, MESSAGE_WORDS) for _ in range(turns)]
        fresh = turns // 2 if number % 4 == 3 else turns  # every fourth begins anew half way
        made.append(Conversation(texts[kind], says[:fresh]))
        if fresh < turns:
            made.append(Conversation(texts[kind], says[fresh:], begins=fresh))
        if number % 2 == 0:  # every second one calls a sub-agent
            task = [words(dice, MESSAGE_WORDS) for _ in range(3)]
            made.append(Conversation(agents[kind], task, begins=1 + number % max(1, turns - 3)))
    for number, conversation in enumerate(made):
        conversation.name = f"{label.strip()}-{number}"
    return made


def body_of(dialect: str, conversation: Conversation, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": role, "content": text} for role, text in conversation.messages]
    head: dict[str, Any] = {"model": "default", "stream": stream}
    if dialect == "responses":
        return head | {"instructions": conversation.system, "input": messages, "store": False}
    if dialect == "messages":
        return head | {"system": conversation.system, "messages": messages, "max_tokens": 64}
    return head | {"messages": [{"role": "system", "content": conversation.system}, *messages], "max_tokens": 64}


def text_of(dialect: str, answer: dict[str, Any]) -> str:
    if dialect == "responses":
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        return "".join(part.get("text", "") for part in parts)
    if dialect == "messages":
        return "".join(block.get("text", "") for block in answer["content"])
    return str(answer["choices"][0]["message"]["content"])


# --- running it ---------------------------------------------------------------------------------


@dataclass
class Result:
    """What one way of sharing has cost."""

    name: str
    computed: list[int]  # by node
    requests: list[int]  # by node
    decisions: list[float]  # milliseconds
    ways: Counter[str] = field(default_factory=Counter)  # how nodes were chosen

    @property
    def total(self) -> int:
        return sum(self.computed)


def busiest(counts: Sequence[int]) -> float:
    return max(counts) / statistics.mean(counts) if sum(counts) else 0.0


Place = Callable[[Conversation, int], str]
"""The address that the n-th request is sent to, by its conversation."""


def play(
    dialect: str, work: list[Conversation], place: Place, at_once: int, *, model: str, named: bool
) -> list[httpx.Response]:
    """All turns of all conversations, round by round; answers in no order. `named`: LiteLLM is told which is which."""
    answers: list[httpx.Response] = []
    numbers = itertools.count()
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(timeout=ANSWER_SECONDS, headers=headers, limits=httpx.Limits(max_connections=None)) as web:

        def turn(conversation: Conversation, say: str) -> None:
            conversation.messages.append(("user", say))
            url = f"{place(conversation, next(numbers))}/v1/{dialect}"
            session = {"x-litellm-session-id": conversation.name} if named else {}
            answer = web.post(url, json=body_of(dialect, conversation) | {"model": model}, headers=session)
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
            conversation.messages.append(("assistant", text_of(dialect, answer.json())))
            answers.append(answer)

        with ThreadPoolExecutor(at_once) as threads:
            for number in range(max(each.begins + len(each.turns) for each in work)):
                now = [each for each in work if each.begins <= number < each.begins + len(each.turns)]
                says = [each.turns[number - each.begins] for each in now]
                list(threads.map(turn, now, says))
    return answers


def measure(
    name: str, nodes: Sequence[NodeProcess], dialect: str, work: list[Conversation], place: Place, at_once: int
) -> Result:
    before, answered = all_computed(nodes), [node.answered() for node in nodes]
    counts: Counter[str] = Counter()

    def counted(conversation: Conversation, number: int) -> str:
        url = place(conversation, number)
        counts[url] += 1
        return url

    model = nodes[0].model() if name == "smg" else "default"  # it knows the names that nodes list
    answers = play(dialect, work, counted, at_once, model=model, named=name == "affinity")
    result = Result(name, [now - was for now, was in zip(all_computed(nodes), before, strict=True)], [], [])
    labels = [answer.headers[NODE_HEADER].split("; ") for answer in answers if NODE_HEADER in answer.headers]
    served = Counter(label[0] for label in labels)
    result.requests = [
        served[node.name] or counts[node.url] or node.answered() - was
        for node, was in zip(nodes, answered, strict=True)
    ]
    result.decisions = [float(label[2].split()[0]) for label in labels]
    result.ways = Counter(label[1] for label in labels)
    return result


def _in_turn(addresses: Sequence[str]) -> Place:
    return lambda conversation, number: addresses[number % len(addresses)]


def compare(options: argparse.Namespace, folder: Path, say: Callable[[str], None] = print) -> list[Result]:
    shape = (options.conversations, options.systems, options.turns)
    found = []
    with node_processes(options.nodes, folder) as nodes:
        urls = [node.url for node in nodes]

        def by_hash(conversation: Conversation, number: int) -> str:
            first = conversation.system + conversation.messages[0][1]
            return urls[int(sha256(first.encode()).hexdigest(), 16) % len(urls)]

        direct: dict[str, Place] = {
            "one": lambda conversation, number: urls[0],
            "robin": lambda conversation, number: urls[number % len(urls)],
            "hash": by_hash,
        }
        before = {"affinity": session_affinity, "smg": smg}
        for name in ("one", *options.only):
            work = workload(f"{name:8}", *shape)
            if name in direct:
                made: Any = nullcontext([])
            else:
                made = proxies(nodes, options.proxies, folder) if name == "nodes" else before[name](nodes, folder)
            with made as addresses:
                place = direct.get(name) or _in_turn(addresses)
                found.append(measure(name, nodes, options.dialect, work, place, options.at_once))
            say(f"{name}: {found[-1].computed}, requests {found[-1].requests}")
    return found


# --- nodes that end, freeze and begin again -------------------------------------------------------


@dataclass
class Kills:
    """What became of requests while nodes were killed, frozen and started again."""

    answered: int = 0
    broken: int = 0  # streams that had begun, and ended with an error event
    failed: list[str] = field(default_factory=list)  # requests that were refused or ended in no way of their dialect
    done: Counter[str] = field(default_factory=Counter)  # what was done to nodes
    afterwards: float = 0.0  # computed by all nodes / one node, when all answer again


# What stands in a stream once if it is complete, if it broke, and for each answer that begins in it (with its id).
# LiteLLM writes Responses without the lines that name an event.
_COMPLETE = {
    "chat/completions": r"^data: \[DONE\]",
    "messages": r"^event: message_stop",
    "responses": r'^data: \{.*"type": ?"response\.completed"',
}
_BROKEN = {
    "chat/completions": r'^data: \{"error"',
    "messages": r"^event: error",
    "responses": r'^data: \{.*"type": ?"response\.failed"',
}
_BEGUN = {
    "chat/completions": r'^data: \{.*?"id": ?"(chatcmpl[^"]*)"',
    "messages": r'^data: \{.*?"type": ?"message_start".*?"id": ?"([^"]*)"',
    "responses": r'^data: \{.*"type": ?"response\.created".*?(.)',
}


def kill_nodes(options: argparse.Namespace, folder: Path, say: Callable[[str], None] = print) -> Kills:
    """`options.kills` times one node is killed, frozen for a while or started again, while streams are asked for."""
    found, dice, over = Kills(), random.Random(options.seed), threading.Event()
    slow = {"ORACLE_SLEEP_PER_STEP": "0.1"}  # so that many streams are in the middle
    with node_processes(options.nodes, folder, **slow) as nodes, proxies(nodes, options.proxies, folder) as made:
        traffic = [
            threading.Thread(target=_ask_on, args=(number, made[number % len(made)], found, over), daemon=True)
            for number in range(options.at_once)
        ]
        for thread in traffic:
            thread.start()
        try:
            for number in range(options.kills):
                node, how = dice.choice(nodes), dice.choice(("kill", "freeze", "restart"))
                found.done[how] += 1
                time.sleep(dice.uniform(0.0, 3.0))
                _hurt(node, how, dice)
                say(
                    f"{number + 1}. {how} {node.name}: {found.answered} answered, {found.broken} broken, {found.failed}"
                )
        finally:
            over.set()
            for thread in traffic:
                thread.join(ANSWER_SECONDS)
        found.afterwards = _afterwards(options, nodes, made)
    return found


def _afterwards(options: argparse.Namespace, nodes: Sequence[NodeProcess], made: Sequence[str]) -> float:
    """Computed prompt tokens through the proxies / one node's, now that all nodes answer."""
    found = []
    for name, place in {"alone": _in_turn([nodes[0].url]), "after": _in_turn(made)}.items():
        work = workload(name, options.conversations, options.systems, options.turns)
        found.append(measure(name, nodes, "chat/completions", work, place, options.at_once))
    show(found)
    return found[1].total / found[0].total


def _hurt(node: NodeProcess, how: str, dice: random.Random) -> None:
    """Returns when the node answers again, so that the others can always answer."""
    if how == "freeze":
        node.process.send_signal(signal.SIGSTOP)
        time.sleep(dice.uniform(1.0, 20.0))
        node.process.send_signal(signal.SIGCONT)
    else:
        node.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        node.process.wait()
        node.start()
    node.wait()


def _ask_on(number: int, url: str, found: Kills, over: threading.Event) -> None:
    """One agent: a conversation after the other, in all dialects, until it is `over`."""
    dice = random.Random(number)
    with httpx.Client(timeout=ANSWER_SECONDS, headers={"Authorization": f"Bearer {KEY}"}) as web:
        for dialect in itertools.cycle(_COMPLETE):
            conversation = Conversation(f"system {number % 3}. {words(random.Random(number % 3), 300)}", [])
            for _ in range(3):
                if over.is_set():
                    return
                conversation.messages.append(("user", f"{words(dice, 20)} [[long 100]]"))
                try:
                    answer = web.post(f"{url}/v1/{dialect}", json=body_of(dialect, conversation, stream=True))
                except httpx.HTTPError as error:
                    found.failed.append(f"{dialect}: {error!r}")
                    continue
                _judge(dialect, answer, found)
                conversation.messages.append(("assistant", "Done."))


def _judge(dialect: str, answer: httpx.Response, found: Kills) -> None:
    text = answer.text

    def ids(patterns: dict[str, str]) -> list[str]:
        return re.findall(patterns[dialect], text, re.MULTILINE)

    begun = len(set(ids(_BEGUN))) if dialect == "chat/completions" else len(ids(_BEGUN))
    if answer.status_code == 200 and begun > 1:
        found.failed.append(f"{dialect}: {begun} answers in one: {text[:300]} ... {text[-300:]}")
    elif answer.status_code == 200 and ids(_BROKEN):
        found.broken += 1
    elif answer.status_code == 200 and len(ids(_COMPLETE)) == 1:
        found.answered += 1
    else:
        found.failed.append(f"{dialect}: {answer.status_code} {text[-300:]}")


def show(found: Sequence[Result]) -> None:
    table = Table("", "computed / one", "busiest/mean (requests)", "(computed)", "decision p50", "p99", "how", box=None)
    for result in found:
        times = sorted(result.decisions) or [0.0]
        figures = (result.total / found[0].total, busiest(result.requests), busiest(result.computed))
        spent = (statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))])
        how = ", ".join(f"{name} {count}" for name, count in result.ways.most_common())
        table.add_row(result.name, *(f"{each:.2f}" for each in figures), *(f"{each:.1f} ms" for each in spent), how)
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--proxies", type=int, default=1)
    parser.add_argument("--dialect", choices=["chat/completions", "messages", "responses"], default="chat/completions")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--systems", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4, help="requests at the same time")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS[:3], help="ways to share, beside one node")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--kills", type=int, default=0, help="nodes are killed, frozen, started again so often")
    parser.add_argument("--seed", type=int, default=1, help="of --kills")
    options = parser.parse_args(arguments)
    if options.kills:
        with tempfile.TemporaryDirectory() as folder:
            kills = kill_nodes(options, Path(folder))
        print(kills)
        return 1 if kills.failed or kills.afterwards > MOST_AFTERWARDS else 0
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    show(found)
    if options.out:
        options.out.write_text(json.dumps([vars(result) for result in found], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
