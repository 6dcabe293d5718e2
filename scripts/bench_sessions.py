"""Replays recorded agent sessions through the real store, and counts what is computed again; other policies beside it.

The store, its planner, eviction and disk tier are the real ones; KV is shrunk to a few bytes a token, and time is
virtual: requests come at their recorded times, and seconds are those of the device that the options describe. A turn
waits for its own prefill and for what is read from disk; queues are not simulated.

usage: python3.12 install_and_run.py run scripts/bench_sessions.py PATH.. [--at-once N..] [--budgets N..] [--hybrid]
PATH: a file with a session a line (`Session.parse` tells the format; may be .gz), or a JSON file of kv-cache-tester.

Columns: computed / optimum, where the optimum computes what no earlier prompt began with; the share of reuse that came
from memory and from disk; seconds waited at p50 and p90; KB that a real model would have written to disk for each token
of the optimum; and what was computed beyond the optimum, by cause, in parts of the optimum (evicted; no checkpoint: the
state there was not kept; floor: between restore places). With `--restart` the server is started again in the middle,
and a second line tells the next turn of each conversation. With `--hybrid` only that which knows the future is hybrid.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.core.prompt import Prompt
from start_llm.kvcache.disk.format import StoredPiece
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import StoredEnd

TOKEN_BYTES = 4  # of shrunk KV: a key and a value of one float16
GAP_SECONDS = 60.0  # between two sessions of one slot
GENERATION = 2  # tokens behind the last message: recorded prompts part there from the next one, to the token
FOREVER = math.inf
_CALLS = {"tool_use": True, "end_turn": False}  # by how an answer ended


# --- sessions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A request of a session: seconds since its begin, who asks, prompt tokens, the ids of the prompt's blocks, and
    whether its answer called tools (``None``: not recorded)."""

    time: float
    agent: str
    tokens: int
    blocks: tuple[int, ...]
    calls: bool | None = None


@dataclass(frozen=True)
class Session:
    name: str
    block: int
    head: int
    turns: list[Turn]

    @staticmethod
    def parse(data: dict[str, Any]) -> Session:
        """Of one line: `id`, `block` (tokens in a block), `tools`, `system` (their tokens), and `requests`: lists of
        [t, agent, in, out, think, api, keep, new]; the prompt's first `keep` blocks are those of the same agent's
        request before, `new` are the ids behind them. Or of a file of kv-cache-tester, which also tells how answers
        ended: a server knows that, and evicts by it.
        """
        if "block_size" in data:
            turns = list(_nested(data["requests"], "main", 0.0))
            head = data.get("tool_tokens", 0) + data.get("system_tokens", 0)
            return Session(data["id"], data["block_size"], head, turns)
        last: dict[str, tuple[int, ...]] = {}
        turns = []
        for time, agent, tokens, _, _, _, keep, new in data["requests"]:
            last[agent] = (*last.get(agent, ())[:keep], *new)
            turns.append(Turn(time, agent, tokens, last[agent]))
        return Session(data["id"], data["block"], data["tools"] + data["system"], turns)

    @property
    def longest(self) -> int:
        return max(turn.tokens for turn in self.turns)


def _nested(requests: Iterable[dict[str, Any]], agent: str, begun: float) -> Iterator[Turn]:
    """Requests of kv-cache-tester; a sub-agent's stand in an entry of their own, with times of their own."""
    for number, request in enumerate(requests):
        if "requests" in request:
            yield from _nested(request["requests"], f"{agent}.{number}", begun + request["t"])
        elif request.get("hash_ids"):
            calls = _CALLS.get(request.get("stop", ""))
            yield Turn(begun + request["t"], agent, request["in"], tuple(request["hash_ids"]), calls)


def read_sessions(paths: Sequence[Path]) -> list[Session]:
    found = []
    for path in paths:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [text] if path.suffix == ".json" else text.splitlines()
        found += [Session.parse(json.loads(line)) for line in lines]
    return found


@dataclass(frozen=True)
class Request:
    """A turn at its time on the server, with its prompt's tokens.

    What is recorded is whole blocks: a block in which two prompts part is another one as a whole. So a place inside a
    block stands at the block's beginning here, as the parting itself does.

    Attributes:
        head: where tools and system text end.
        generation: where the last message ends.
        reusable: tokens that some earlier prompt of the session began with.
        calls: of the `Turn`.
    """

    time: float
    conversation: str
    session: int
    tokens: NDArray[np.int32]
    head: int
    generation: int
    reusable: int
    calls: bool | None = None


def timeline(sessions: Sequence[Session], at_once: int) -> list[Request]:
    """All requests by time: `at_once` slots, in each one session after the other."""
    slots = [0.0] * at_once
    requests: list[Request] = []
    base = 0
    for number, session in enumerate(sessions):
        begin = heapq.heappop(slots)
        heapq.heappush(slots, begin + max(turn.time for turn in session.turns) + GAP_SECONDS)
        ids = sorted({block for turn in session.turns for block in turn.blocks})
        place = {block: base + index for index, block in enumerate(ids)}
        base += len(ids)
        seen: dict[int, int] = {}  # how much of each block was sent: the last one of a prompt may be partly filled
        for turn in sorted(session.turns, key=lambda turn: turn.time):
            blocks = np.fromiter((place[block] for block in turn.blocks), np.int64)
            tokens = (blocks[:, None] * session.block + np.arange(session.block)).reshape(-1)[: turn.tokens]
            known = list(takewhile(seen.__contains__, turn.blocks))
            reusable = min((len(known) - 1) * session.block + seen[known[-1]], len(tokens)) if known else 0
            filled = len(tokens) - (len(turn.blocks) - 1) * session.block
            seen |= dict.fromkeys(turn.blocks[:-1], session.block)
            seen[turn.blocks[-1]] = max(filled, seen.get(turn.blocks[-1], 0))
            name = f"{session.name}/{turn.agent}"
            head, generation = (
                min(at // session.block * session.block, len(tokens)) for at in (session.head, turn.tokens - GENERATION)
            )
            prompt = tokens.astype(np.int32)
            time = begin + turn.time
            requests.append(Request(time, name, number, prompt, head, generation, reusable, turn.calls))
    return sorted(requests, key=lambda request: request.time)


@dataclass(frozen=True)
class Device:
    """Prefill: tokens a second. Disk: bytes a second. KV: real bytes a token."""

    prefill: float
    disk: float
    token_bytes: int


@dataclass
class Score:
    """What one policy did. Tokens; `written`: bytes of a real model's KV; `arrays`: the most that KV was in."""

    policy: str
    prompt: int = 0
    optimum: int = 0
    computed: int = 0
    from_memory: int = 0
    from_disk: int = 0
    written: int = 0
    arrays: int = 0
    waits: list[float] = field(default_factory=list)
    excess: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, reused: int, device: Device, *, from_disk: int = 0, cause: str = "evicted") -> None:
        total = len(request.tokens)
        least = max(total - request.reusable, 1)  # the last token is always computed
        computed = total - reused
        self.prompt += total
        self.optimum += least
        self.computed += computed
        self.from_memory += reused - from_disk
        self.from_disk += from_disk
        self.waits.append(computed / device.prefill + from_disk * device.token_bytes / device.disk)
        if computed > least:
            self.excess[cause] += computed - least

    def row(self, device: Device) -> list[str]:
        reused = max(self.from_memory + self.from_disk, 1)
        waits = sorted(self.waits)
        causes = ", ".join(f"{cause} {tokens / self.optimum:.2f}" for cause, tokens in self.excess.most_common())
        return [
            self.policy,
            f"{self.computed / self.optimum:.3f}",
            f"{self.from_memory / reused:.0%} + {self.from_disk / reused:.0%}",
            f"{statistics.median(waits):.1f} / {waits[len(waits) * 9 // 10]:.1f}",
            f"{self.written / self.optimum / 1024:.0f}" if self.written else "-",
            causes,
        ]


# --- ours -------------------------------------------------------------------------------------------------------------


class TinyModel:
    """Its KV takes a few bytes a token. What is in it does not matter."""

    def __init__(self, state_tokens: int, arrays: int = 1, layers: int = 1) -> None:
        """`state_tokens`: a state, of so many `arrays`, takes as much as the KV of so many tokens; 0: there is none.
        `layers`: with KV."""
        self._state, self._arrays = state_tokens * TOKEN_BYTES * layers // 2 // arrays, arrays
        self._layers = layers
        self.kit = LayerKit(self._empty)

    def _empty(self) -> list[Any]:
        return [*(KVCache() for _ in range(self._layers)), *([ArraysCache(self._arrays)] if self._state else [])]

    def prefill(self, cache: list[Any], length: int) -> None:
        """Continues caches up to so many tokens."""
        keys = mx.zeros((1, 1, length - cache[0].offset, 1), mx.float16)
        for layer in cache[: self._layers]:
            layer.update_and_fetch(keys, keys)
        for number in range(self._arrays if self._state else 0):
            cache[-1][number] = mx.zeros((1, self._state), mx.float16)


class CountingTier(DiskTier):
    """Counts what a real model would have written. `tokens` with KV, `states` of layers that cannot be cut."""

    tokens = states = 0

    def write(self, piece: StoredPiece, buffers: Any, layout: str) -> str:
        self.tokens += len(piece.tokens) // 4
        self.states += not piece.tokens
        return super().write(piece, buffers, layout)


def replay_ours(
    requests: Sequence[Request],
    budget: int,
    device: Device,
    state_tokens: int,
    folder: Path | None,
    restart: bool = False,
    arrays: tuple[int, int] = (1, 0),
    layers: int = 1,
) -> list[Score]:
    """The real store, as the engine calls it: look up, lend, pause for checkpoints, store at the end, take back.

    With `restart` the store is closed half-way and opened anew; the second score is that of the turns that each
    conversation of before continues with. `arrays`: of a state, and the most in memory. `layers`: with KV.
    """
    score, resumed = Score("start_llm" + " + disk" * (folder is not None)), Score("next turns after a restart")
    model, now, written = TinyModel(state_tokens, arrays[0], layers), 0.0, 0
    config = StoreConfig((budget or 1 << 40) * TOKEN_BYTES * layers, most_arrays=arrays[1])

    def opened() -> tuple[KVStore, CountingTier | None]:
        disk = CountingTier(folder, "bench", 1 << 50) if folder is not None else None
        return KVStore(model.kit, config, disk=disk, clock=lambda: now), disk

    store, disk = opened()
    waiting = set[str]()
    for number, request in enumerate(requests):
        idle, now = min(int(request.time - now), 60), request.time
        for _ in range(idle if arrays[1] else 1):  # once a second, to pack arrays; for the rest once is enough
            store.idle()
        if restart and number == len(requests) // 2:
            waiting = {before.conversation for before in requests[:number]}
            store.close()
            written += _written(disk, device, state_tokens)
            store, disk = opened()
        tokens = request.tokens
        prompt = Prompt(tuple(tokens.tolist()), system_end=request.head, generation=request.generation)
        plan = store.lookup(prompt.tokens, len(tokens) - 1)
        paged = store.stats()["paged_tokens"]
        found = store.restore(prompt.tokens, plan)
        paged = store.stats()["paged_tokens"] - paged
        reason = plan.reason if plan.reason in {"evicted", "no_checkpoint"} else "floor"
        parts = [score, resumed] if request.conversation in waiting else [score]
        waiting.discard(request.conversation)
        for part in parts:
            part.add(request, found.length, device, from_disk=min(paged, found.length), cause=reason)
        about = StoredEnd(session=request.conversation, seconds_per_token=1 / device.prefill)
        for place in store.stops(prompt, found.length):
            model.prefill(found.cache, place)
            at_end = place == prompt.system_end
            store.put(tokens[:place], found.cache, replace(about, system_end=at_end, answered=False))
        model.prefill(found.cache, len(tokens))
        store.put(prompt.tokens, found.cache, replace(about, calls=request.calls))
        store.take_back(found.cache)
        score.arrays = max(score.arrays, store.resident.arrays)
        if disk is not None:
            store.disk.flush()
        mx.clear_cache()
    store.close()
    score.written = written + _written(disk, device, state_tokens)
    return [score, resumed] if restart else [score]


def _written(disk: CountingTier | None, device: Device, state_tokens: int) -> int:
    return 0 if disk is None else (disk.tokens + disk.states * state_tokens) * device.token_bytes


class BlockCache:
    """Blocks of a tree of prompts in `budget` tokens; what has the smallest rank goes first.

    A block is named by its first token, which is enough here: equal blocks have equal tokens in front of them.
    All blocks of one rank need one state, as large as the KV of `state_tokens`; those never used again need none.
    """

    def __init__(self, budget: int, block: int, state_tokens: int = 0) -> None:
        self._budget = budget or 1 << 60
        self._block = block
        self._state = state_tokens
        self._alike: Counter[float] = Counter()  # blocks by rank
        self._rank: dict[int, tuple[float, int]] = {}
        self._queue: list[tuple[tuple[float, int], int]] = []

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        return next((index for index, block in enumerate(blocks) if block not in self._rank), len(blocks))

    def use(self, blocks: Sequence[int], ranks: Iterable[float]) -> None:
        """They are there now; deeper ones go before those in front of them."""
        for depth, (block, rank) in enumerate(zip(blocks, ranks, strict=True)):
            self._forget(block)
            self._rank[block] = rank, -depth
            self._alike[rank] += 1
            heapq.heappush(self._queue, (self._rank[block], block))
        while self._tokens() > self._budget:
            rank_then, block = heapq.heappop(self._queue)
            if self._rank.get(block) == rank_then:
                self._forget(block)

    def _tokens(self) -> int:
        states = len(self._alike) - (-FOREVER in self._alike)
        return len(self._rank) * self._block + states * self._state

    def _forget(self, block: int) -> None:
        if (found := self._rank.pop(block, None)) is not None:
            self._alike[found[0]] -= 1
            if not self._alike[found[0]]:
                del self._alike[found[0]]


def replay_blocks(
    name: str,
    requests: Sequence[Request],
    budget: int,
    device: Device,
    block: int,
    ranks: Callable[[int, Sequence[int]], Iterable[float]],
    state_tokens: int = 0,
) -> Score:
    """`ranks`: of the blocks of the request with this number."""
    score, cache = Score(name), BlockCache(budget, block, state_tokens)
    for number, request in enumerate(requests):
        blocks = _blocks(request, block)
        reused = min(cache.match(blocks) * block, request.reusable, len(request.tokens) - 1)
        cause = "floor" if cache.match(blocks) * block + block > request.reusable else "evicted"
        score.add(request, reused, device, cause=cause)
        cache.use(blocks, ranks(number, blocks))
    return score


def _blocks(request: Request, block: int) -> list[int]:
    """The whole blocks of a prompt, by their last tokens."""
    found: list[int] = request.tokens[block - 1 :: block].tolist()
    return found


def replay_lru(name: str, requests: Sequence[Request], budget: int, device: Device, block: int) -> Score:
    return replay_blocks(name, requests, budget, device, block, lambda number, blocks: [float(number)] * len(blocks))


def replay_oracle(requests: Sequence[Request], budget: int, device: Device, block: int, state_tokens: int = 0) -> Score:
    """What is used again last goes first.

    With `state_tokens` each request to come has one state, at the end of its KV wherever that is given up. Nobody can
    move a state, so this is a lower bound.
    """
    uses: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        for each in _blocks(request, block):
            uses.setdefault(each, []).append(number)

    def ranks(number: int, blocks: Sequence[int]) -> Iterator[float]:
        for each in blocks:
            after = uses[each]
            index = bisect_right(after, number)
            yield -after[index] if index < len(after) else -FOREVER

    return replay_blocks("knows the future", requests, budget, device, block, ranks, state_tokens)


def replay_conversations(requests: Sequence[Request], budget: int, device: Device) -> Score:
    """Whole prompts, the longest unused goes first; one that is continued is taken over, a fork is a copy."""
    score = Score("LRU, whole conversations")
    kept: list[Request] = []  # the longest unused first
    for request in requests:
        lengths = [_common(one.tokens, request.tokens) if one.session == request.session else 0 for one in kept]
        best = max(range(len(kept)), key=lambda index: (lengths[index], index), default=None)
        length = lengths[best] if best is not None else 0
        score.add(request, min(length, len(request.tokens) - 1), device)
        if best is not None and length:
            found = kept.pop(best)
            if length < len(found.tokens):
                kept.append(found)
        kept.append(request)
        while budget and len(kept) > 1 and sum(len(one.tokens) for one in kept) > budget:
            kept.pop(0)
    return score


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def scores(requests: Sequence[Request], budget: int, device: Device, options: argparse.Namespace) -> Iterator[Score]:
    state = options.state_tokens if options.hybrid else 0
    yield from replay_ours(requests, budget, device, state, None)
    if options.disk:
        with tempfile.TemporaryDirectory() as folder:
            yield from replay_ours(requests, budget, device, state, Path(folder), options.restart)
    if options.baselines:
        yield replay_oracle(requests, budget, device, options.block, state)
        yield replay_lru("LRU, blocks of a tree", requests, budget, device, options.block)
        yield replay_lru("LRU, blocks of 256", requests, budget, device, 256)
        yield replay_conversations(requests, budget, device)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 3, 8], help="sessions at once")
    parser.add_argument("--budgets", type=int, nargs="+", default=[262144, 524288, 1048576, 0], help="tokens; 0: all")
    parser.add_argument("--hybrid", action="store_true", help="a model with recurrent state")
    parser.add_argument("--state-tokens", type=int, default=1024, help="its size, in tokens of KV")
    parser.add_argument("--restart", action="store_true", help="with disk: start the server again half-way")
    parser.add_argument("--no-disk", dest="disk", action="store_false")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false")
    parser.add_argument("--longest", type=int, default=200_000, help="leave out sessions with longer prompts")
    parser.add_argument("--most", type=int, default=None, help="so many sessions only")
    parser.add_argument("--block", type=int, default=64, help="of the baselines that keep blocks of a tree")
    parser.add_argument("--prefill", type=float, default=600.0, help="tokens a second")
    parser.add_argument("--disk-speed", type=float, default=3e9, help="bytes a second")
    parser.add_argument("--token-bytes", type=int, default=65536, help="of real KV")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    device = Device(options.prefill, options.disk_speed, options.token_bytes)
    sessions = [one for one in read_sessions(options.paths) if one.longest <= options.longest][: options.most]
    console = Console()
    for at_once in options.at_once:
        requests = timeline(sessions, at_once)
        for budget in options.budgets:
            limit = f"{budget:,} tokens" if budget else "no limit"
            kind = "hybrid" if options.hybrid else "plain"
            table = Table(
                "policy", "computed / optimum", "reuse: memory + disk", "s waited p50 / p90", "KB / token", "beyond"
            )
            for score in scores(requests, budget, device, options):
                table.add_row(*score.row(device))
            table.title = f"{len(sessions)} sessions, {len(requests)} requests, {at_once} at once, {kind}, {limit}"
            console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
