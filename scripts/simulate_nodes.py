"""How proxies share out conversations over many runs: the decision of `proxy/fleet` with simulated nodes.

The work is that of `bench_nodes`, its order too. A simulated node has a beginning of a prompt when it has computed it;
it computes one prompt at a time. How long the nodes take to answer, to compute and to be reached is drawn anew for each
run. Time is simulated, so a run takes a fraction of a second. What it shows are decisions, no times.

    python3.12 install_and_run.py run scripts/simulate_nodes.py --seeds 200 --proxies 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_nodes import Conversation, busiest, workload
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.nodes import ServerNode
from start_llm.proxy.routing import route_key

TOKENS_OF_A_WORD = 3
ANSWER = "Done."
LATE = 20


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: where nothing is to be done, its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready, timers = vars(self)["_ready"], vars(self)["_scheduled"]
        if not ready and timers:
            self._now = max(self._now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def simulated[T](coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


@dataclass
class Delays:
    """Seconds, of one run; and tokens a second. Each delay is drawn between nothing and twice its value."""

    explain: float
    reach: float  # from the proxy's decision until the node has the request
    decode: float
    speed: float

    @classmethod
    def drawn(cls, dice: random.Random) -> Delays:
        return cls(
            dice.uniform(0.005, 0.08),
            dice.uniform(0.005, 0.1),
            dice.uniform(0.05, 1.0),
            dice.uniform(1_000, 20_000),
        )


@dataclass
class SimulatedNode:
    number: int
    delays: Delays
    dice: random.Random
    late: float = 0.0  # part of all pauses that are `LATE` times as long
    computed: int = 0
    requests: int = 0
    running: int = 0
    stored: set[str] = field(default_factory=set)  # beginnings of prompts, by their text
    engine: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        return f"http://node-{self.number}"

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(self.dice.uniform(0, 2 * seconds) * (LATE if self.dice.random() < self.late else 1))

    def reused(self, parts: Sequence[str]) -> int:
        """Tokens of the longest beginning of the prompt that is stored."""
        found = (end for end in range(len(parts), 0, -1) if "\n".join(parts[:end]) in self.stored)
        return sum(map(tokens_of, parts[: next(found, 0)]))

    async def answer(self, parts: Sequence[str]) -> None:
        await self.pause(self.delays.reach)
        self.requests += 1
        self.running += 1
        async with self.engine:
            new = sum(map(tokens_of, parts)) - self.reused(parts)
            await asyncio.sleep(new / self.delays.speed)
            self.computed += new
            self.stored.update("\n".join(parts[:end]) for end in range(1, len(parts) + 1))
        await self.pause(self.delays.decode)
        self.stored.add("\n".join([*parts, ANSWER]))
        self.running -= 1

    async def asked(self, request: httpx.Request) -> httpx.Response:
        """What a proxy's question gets."""
        now = {"running": self.running, "queued": 0}
        if request.url.path == "/health":
            return answered({"state": "ready"} | now)
        if request.url.path == "/v1/models":
            card = {"id": "default", "details": {"state": "ready"}}
            return answered({"data": [card]})
        body = json.loads(request.content)
        await self.pause(self.delays.explain)
        parts = [message["content"] for message in body["messages"]]
        return answered({"reused": self.reused(parts), "prompt": sum(map(tokens_of, parts))} | now)


def answered(body: dict[str, Any]) -> httpx.Response:
    """With the body still to be read, as it comes from a real node."""
    return httpx.Response(200, stream=httpx.ByteStream(json.dumps(body).encode()))


def tokens_of(text: str) -> int:
    return TOKENS_OF_A_WORD * (text.count(" ") + 1)


@dataclass(frozen=True)
class Outcome:
    computed: float  # / one node
    requests: float  # of the busiest node / the mean
    computed_share: float  # the same of computed tokens


@dataclass
class Cluster:
    """Nodes, the proxies in front of them in turn, and a node that would have all requests."""

    dice: random.Random
    delays: Delays
    by_host: Mapping[str, SimulatedNode]
    fleets: Sequence[NodeFleet]
    alone: SimulatedNode
    free: asyncio.Semaphore  # requests at the same time
    sent: int = 0

    async def turn(self, conversation: Conversation, say: str) -> None:
        async with self.free:
            conversation.messages.append(("user", say))
            messages = [{"role": role, "content": text} for role, text in conversation.messages]
            body = {"model": "default", "messages": [{"role": "system", "content": conversation.system}, *messages]}
            fleet, self.sent = self.fleets[self.sent % len(self.fleets)], self.sent + 1
            await asyncio.sleep(self.dice.uniform(0, 2 * self.delays.reach))
            choice = await fleet.pick(route_key(body, {}), explain=json.dumps(body).encode())
            parts = [message["content"] for message in body["messages"]]  # type: ignore[index]
            with fleet.sending(choice) as begun:
                await self.by_host[choice.node.name].answer(parts)
                begun()
            self.alone.stored.update("\n".join(parts[:end]) for end in range(1, len(parts) + 1))
            conversation.messages.append(("assistant", ANSWER))


async def run(options: argparse.Namespace, seed: int) -> Outcome:
    dice = random.Random(seed)
    delays = Delays.drawn(dice)
    work = workload(f"seed {seed}", options.conversations, options.systems, options.turns, seed)
    nodes = [SimulatedNode(number, delays, dice, options.late) for number in range(options.nodes)]
    by_host = {f"node-{node.number}": node for node in nodes}
    fleets = [await _watching(nodes, by_host) for _ in range(options.proxies)]
    alone = SimulatedNode(-1, delays, dice)
    await asyncio.sleep(3)  # the nodes have said which models they have
    cluster = Cluster(dice, delays, by_host, fleets, alone, asyncio.Semaphore(options.at_once))
    for number in range(max(each.begins + len(each.turns) for each in work)):
        now = [each for each in work if each.begins <= number < each.begins + len(each.turns)]
        await asyncio.gather(*(cluster.turn(each, each.turns[number - each.begins]) for each in now))
    for fleet in fleets:
        await _end(fleet)
    return Outcome(
        sum(node.computed for node in nodes) / _asked(alone),
        busiest([node.requests for node in nodes]),
        busiest([node.computed for node in nodes]),
    )


def _asked(node: SimulatedNode) -> int:
    """The tokens that a single node would have to compute."""
    return sum(tokens_of(text.rpartition("\n")[2]) for text in node.stored if not text.endswith(ANSWER))


async def _watching(nodes: Sequence[SimulatedNode], by_host: Mapping[str, SimulatedNode]) -> NodeFleet:
    """A proxy's view of the nodes, which it has begun to ask."""
    fleet = NodeFleet([ServerNode(node.url) for node in nodes], {})
    await fleet.client.aclose()
    fleet.client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: by_host[request.url.host].asked(request))  # type: ignore[arg-type]
    )
    fleet.watch()
    return fleet


async def _end(fleet: NodeFleet) -> None:
    for task in fleet._watchers:
        task.cancel()
    await fleet.client.aclose()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--proxies", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--systems", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4, help="requests at the same time")
    parser.add_argument("--late", type=float, default=0.0, help=f"part of all delays that are {LATE} times as long")
    options = parser.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = [simulated(run(options, seed)) for seed in seeds]
    for name, label in {
        "computed": "computed / one node",
        "requests": "busiest/mean (requests)",
        "computed_share": "busiest/mean (computed)",
    }.items():
        values = sorted((getattr(each, name), seed) for each, seed in zip(found, seeds, strict=True))
        p50, p90, most = (values[place][0] for place in (len(values) // 2, int(len(values) * 0.9), -1))
        print(f"{label:25} p50 {p50:.2f}  p90 {p90:.2f}  max {most:.2f} (seed {values[-1][1]})")
    good = sum(each.computed <= 1.05 and each.requests <= 1.2 for each in found)
    print(f"{good} of {len(found)} with computed <= 1.05 and busiest/mean (requests) <= 1.2")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
