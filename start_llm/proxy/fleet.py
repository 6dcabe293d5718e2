"""The nodes as the proxy's process sees them: which of them answer, what they have to do, and which one gets a request.

`/health` of each node is asked every `LOOK_EVERY` seconds. A node that does not answer there, or that a request failed
at, is left out at once. It is tried again after pauses that grow (`PAUSES`). `routing` decides; this module knows who
may be offered. One event loop only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from start_llm.core.errors import Unavailable
from start_llm.core.modelmap import ADAPTER_SIGN, MAIN_NAME
from start_llm.proxy.nodes import (
    LOOK_SECONDS,
    ServerNode,
    ask,
    cards_of,
    count_of,
    detail_of,
    headers_for,
    json_of,
    loaded_of,
    node_client,
    state_of,
    talks,
)
from start_llm.proxy.routing import Load, NodePicker, RouteKey

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds that a node is left out after a failure; the last one for all failures after it."""
EXPLAIN_SECONDS = 0.05
"""What the nodes may take to say what they have stored of a prompt. Who is later counts as one that has nothing."""
EXPLAIN_AGAIN_SECONDS = 0.5
"""The same for a conversation that goes on and is not known here: computing all of it again takes longer."""
SILENT_SECONDS = 10.0
"""A node whose `/health` was silent for so long is frozen: what it was sent, and has not begun to answer, is sent to
another one, if one is left."""
FROZEN_SECONDS = 30.0
"""After so long a stream that it had begun ends with an error, and so does what nobody else could answer."""
BUSY_SECONDS = 0.1
"""A timer that is later than that says that this process was busy."""
CARDS_EVERY = 10.0
NODE_HEADER = "x-start-llm-node"
"""Of an answer: the node, how it was chosen and the time that took (`Choice.label`)."""
MOST_BREAKS = 2
"""Nodes at which the connection may break for one request."""
ELSEWHERE = frozenset({401, 403, 429, 502, 503, 504, 507})
"""Statuses that say nothing against the request. 401 and 403: the node does not take the proxy's key, or its name."""


class Member:
    """A node, and what is known of it now."""

    def __init__(self, node: ServerNode) -> None:
        self.node = node
        self.state = "unknown"
        self.running = self.waiting = 0  # by its own count, when it was asked last
        self.models: frozenset[str] | None = None  # ``None``: not known yet
        self.loaded: frozenset[str] = frozenset()
        self.is_believed = True  # what it says of stored KV
        self.open = self.prefill = 0  # requests that were sent from here and not answered; their tokens to compute
        self.silent_seconds = 0.0  # that `/health` has not answered; 0 where a node is gone: its connections break
        self.failures = 0  # in a row
        self.out_until = 0.0
        self.cards_at = -CARDS_EVERY

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def load(self) -> Load:
        """What it said, and what was sent since."""
        return Load(max(self.running, self.open - self.waiting), self.waiting, self.prefill)

    def is_offered(self, now: float) -> bool:
        return self.state in {"unknown", "ready", "busy"} and now >= self.out_until

    def is_in_doubt(self, now: float) -> bool:
        """It was late. It, or this process, may be busy: it keeps its conversations, and is offered where nobody else
        is."""
        return 0 < self.silent_seconds < SILENT_SECONDS and now >= self.out_until


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes.

    `how`: ``alone`` (there is one node), ``only`` (no other one is left), ``response`` (the holder of the response that
    it goes on from), ``conversation``, ``stored``.
    """

    node: ServerNode
    how: str
    seconds: float
    prefill: int = 0  # prompt tokens that the node will have to compute, as far as that is known

    @property
    def label(self) -> str:
        """The value of `NODE_HEADER`; empty where there is one node."""
        return "" if self.how == "alone" else f"{self.node.name}; {self.how}; {self.seconds * 1000:.1f} ms"


def broken(name: str, dialect: str) -> dict[str, Any]:
    """The error of an answer that this node, or model, did not finish; no name: the server. `dialect`: a path."""
    message = f"The connection to {name or 'the server'} broke before its answer was complete."
    if dialect == "messages":
        return {"type": "api_error", "message": message}
    return {"message": message, "type": "server_error", "param": None, "code": "node_lost"}


def _able(members: Sequence[Member], now: float) -> tuple[list[Member], list[Member]]:
    """For `pick`: those that may get a request (perhaps none), and those in doubt: late, and perhaps only busy."""
    in_doubt = [member for member in members if member.is_in_doubt(now)]
    offered = [member for member in members if member.is_offered(now)] or in_doubt
    # One request that all nodes refuse, as with 507, must not leave the others without a node.
    return offered or [member for member in members if member.state in {"ready", "busy"}], in_doubt


class NodeFleet:
    """All nodes of this proxy.

    `names`: the servers' names of models by LiteLLM's, see `config.names_behind`.
    """

    def __init__(self, nodes: Sequence[ServerNode], names: Mapping[str, str]) -> None:
        self.members = {node.name: Member(node) for node in nodes}
        self._names = names
        self._picker, self._placing = NodePicker(), asyncio.Lock()
        self.client = node_client()
        self._watchers: list[asyncio.Task[None]] = []
        self._late: set[asyncio.Task[Any]] = set()  # questions that are not answered yet; some of them nobody waits for

    # --- which nodes answer -------------------------------------------------------------------

    def watch(self) -> None:
        """At the proxy's start: begins to ask the nodes how they are; a lone node is not asked."""
        if not self._watchers and len(self.members) > 1:
            self._watchers = [asyncio.create_task(self._watch(member)) for member in self.members.values()]

    async def _watch(self, member: Member) -> None:
        """Asks a node how it is, until the process ends. A node that fails is asked less and less often."""
        failures = 0
        while True:
            try:
                failures = 0 if await self._look(member) else failures + 1
            except Exception:  # the edge of this task: a node that is not watched would stay in for ever
                log.warning("node %s cannot be watched", member.name, exc_info=True)
                failures += 1
            # A node that is only silent may be busy: it is asked as often as before until it counts as frozen.
            is_short = not failures or 0 < member.silent_seconds < FROZEN_SECONDS
            await asyncio.sleep(LOOK_EVERY if is_short else PAUSES[min(failures, len(PAUSES)) - 1])

    async def _look(self, member: Member) -> bool:
        """Asks a node how it is. Whether it answers requests."""
        before, began = member.state, time.monotonic()
        try:
            answer: httpx.Response | httpx.HTTPError = await ask(self.client, f"{member.node.url}/health")
        except httpx.HTTPError as error:
            answer = error
        seconds = time.monotonic() - began
        if isinstance(answer, httpx.TimeoutException) and seconds > LOOK_SECONDS + LOOK_EVERY:
            return member.state in {"ready", "busy"}  # it is this process that was busy: that says nothing of the node
        state, said = state_of(answer)
        detail = detail_of(said)
        is_due = time.monotonic() - member.cards_at >= CARDS_EVERY
        if state in {"ready", "busy"} and is_due and not await self._read_cards(member):
            state, detail = "refused", "It does not take the key."
        member.state = state
        member.silent_seconds = member.silent_seconds + seconds + LOOK_EVERY if state == "silent" else 0.0
        member.running, member.waiting = count_of(said, "running"), count_of(said, "queued")
        if state != before and {before, state} - {"ready", "busy", "unknown"}:
            log.warning("node %s is %s%s", member.name, state, f": {detail}" if detail else "")
        return state in {"ready", "busy"}

    async def _read_cards(self, member: Member) -> bool:
        """Asks which models a node has. Whether it takes the key, as far as that is known."""
        with suppress(httpx.HTTPError):
            answer = await ask(self.client, f"{member.node.url}/v1/models", headers=headers_for(member.node))
            cards = cards_of(answer)
            if cards:
                talking = min(loaded_of(card for card in cards if talks(card)), default=None)
                member.is_believed = talking is None or not await self._invents(member, talking)
                member.models, member.loaded = frozenset(card["id"] for card in cards), frozenset(loaded_of(cards))
                member.cards_at = time.monotonic()
            return answer.status_code not in {401, 403}
        return member.state != "refused"

    def failed(self, name: str) -> None:
        """A request failed at that node: it is left out for a while."""
        member = self.members[name]
        member.out_until = time.monotonic() + PAUSES[min(member.failures, len(PAUSES) - 1)]
        member.failures += 1

    def gives_up(self, name: str, tried: Collection[str], *, begun: bool = False) -> bool:
        """Whether that node has been silent for too long; `tried`, `begun`: nodes that this request was sent to, and
        whether it is being answered."""
        now = time.monotonic()
        others = any(each.is_offered(now) for each in self.members.values() if each.name not in {name, *tried})
        return self.members[name].silent_seconds > (SILENT_SECONDS if others and not begun else FROZEN_SECONDS)

    def offered(self) -> list[ServerNode]:
        """Those that answer, or else all."""
        now = time.monotonic()
        found = [member.node for member in self.members.values() if member.is_offered(now)]
        return found or [member.node for member in self.members.values()]

    # --- which node gets a request ------------------------------------------------------------

    async def pick(
        self,
        key: RouteKey,
        tried: Collection[str] = (),
        *,
        holder: str | None = None,
        explain: bytes | None = None,
        anthropic: bool = False,
    ) -> Choice:
        """The node for a request that `tried` have failed at.

        Args:
            holder: the only node that can answer: it has the response that the request goes on from.
            explain: the request's body, put to the nodes to learn what they have stored; ``None``: that is not asked.
            anthropic: the body is of the messages dialect.

        Raises:
            Unavailable: no node is left.
        """
        began = time.monotonic()
        serving = [self.members[holder]] if holder in self.members else self._serving(key.model)
        untried = [member for member in serving if member.name not in tried]
        if len(self.members) == 1 and untried:
            return Choice(untried[0].node, "alone", 0.0)
        offered, in_doubt = _able(untried, began)
        if not offered:
            raise self._none_left(serving, tried)
        loads = {member.name: member.load for member in offered}
        # A node that is late may be busy. Computing a conversation elsewhere takes longer than waiting.
        at_home = loads | {member.name: member.load for member in in_doubt}
        home, how, prefill = self._picker.home(key, at_home), "conversation", 0
        if home is None and len(offered) == 1:
            home, how = offered[0].name, "response" if holder else "only"
        if home is None:
            # New conversations one after the other: two that begin at once would not know each other's place.
            async with nullcontext() if key.goes_on else self._placing:
                stored, prompt = await self._stored(offered, key, explain, anthropic)
                loads = {member.name: member.load for member in offered}
                home, how = self._picker.choose(key, loads, stored, prompt), "stored"
                prefill = max(0, prompt - stored.get(home, 0))
                self._picker.remember(key, home, at_home)  # before the next one is placed
        else:
            self._picker.remember(key, home, at_home)
        return Choice(self.members[home].node, how, time.monotonic() - began, prefill)

    async def _done_within[T](self, tasks: Collection[asyncio.Task[T]], seconds: float) -> set[asyncio.Task[T]]:
        """Those that end in that time. Where this process was too busy to read the answers, they get it once more.

        The others end by themselves, as `nodes.ask` says, also where the client has gone meanwhile: a request that is
        cancelled may keep its connection for ever (httpcore 1.0.9).
        """
        began = time.monotonic()
        self._late.update(tasks)  # nobody else holds them
        for task in tasks:
            task.add_done_callback(self._late.discard)
        done, late = await asyncio.wait(tasks, timeout=seconds)
        if late and time.monotonic() - began > seconds + BUSY_SECONDS:
            more, _ = await asyncio.wait(late, timeout=seconds)
            done |= more
        return done

    def _serving(self, model: str) -> list[Member]:
        """Those that list the model, or else all: names that nobody lists mean something to the nodes, or nothing."""
        name = self._names.get(model, model).partition(ADAPTER_SIGN)[0]
        members = list(self.members.values())
        return [each for each in members if name == MAIN_NAME or each.models is None or name in each.models] or members

    def _none_left(self, serving: Sequence[Member], tried: Collection[str]) -> Unavailable:
        """The error that names each node and why it cannot answer."""
        states = ", ".join(
            f"{member.name}: {'it failed at this request' if member.name in tried else member.state}"
            for member in serving
        )
        return Unavailable(f"No node is left that can answer ({states}).", retry_after=PAUSES[0])

    async def _stored(
        self, members: Sequence[Member], key: RouteKey, body: bytes | None, anthropic: bool
    ) -> tuple[dict[str, int], int]:
        """What each node says that it has stored of the prompt, and how long that is; 0 where nobody knows."""
        name = self._names.get(key.model, key.model).partition(ADAPTER_SIGN)[0]
        believed = [member for member in members if member.is_believed]
        ready = [member for member in believed if name == MAIN_NAME or name in member.loaded]  # none is to load it
        if body is None or not ready:
            return {}, 0
        asking = {asyncio.create_task(self._explain(member, body, anthropic)): member.name for member in ready}
        done = await self._done_within(asking, EXPLAIN_AGAIN_SECONDS if key.goes_on else EXPLAIN_SECONDS)
        said = {asking[task]: task.result() for task in done}
        return {name: reused for name, (reused, _) in said.items()}, max((each for _, each in said.values()), default=0)

    async def _explain(self, member: Member, body: bytes, anthropic: bool) -> tuple[int, int]:
        """Prompt tokens that a node says it has stored, and all of the prompt; 0 and 0 where it does not answer."""
        headers = headers_for(member.node) | {b"content-type": b"application/json"}
        headers |= {b"anthropic-version": b"2023-06-01"} if anthropic else {}
        try:
            answer = await ask(self.client, f"{member.node.url}/v1/cache/explain", body=body, headers=headers)
        except httpx.HTTPError:
            return 0, 0
        report = json_of(answer) if answer.status_code == 200 else {}
        if "running" in report:
            member.running = count_of(report, "running")
            member.waiting = count_of(report, "queued")
        return count_of(report, "reused"), count_of(report, "prompt")

    async def _invents(self, member: Member, model: str) -> bool:
        """Whether it claims to have stored most of a prompt of random words, which nobody has ever sent."""
        # A system text, too: without one some templates write a long one of their own, which is stored rightly.
        texts = {role: " ".join(secrets.token_hex(3) for _ in range(200)) for role in ("system", "user")}
        body = {"model": model, "messages": [{"role": role, "content": text} for role, text in texts.items()]}
        reused, prompt = await self._explain(member, json.dumps(body).encode(), False)
        return reused * 2 > prompt

    @contextmanager
    def sending(self, choice: Choice) -> Iterator[Callable[[], None]]:
        """While a request is at that node. What it yields is to be called when the node begins to answer."""
        member, prefill = self.members[choice.node.name], [choice.prefill]
        member.open += 1
        member.prefill += choice.prefill

        def begun() -> None:
            member.failures = 0
            member.prefill -= prefill.pop() if prefill else 0

        try:
            yield begun
        finally:
            member.open -= 1
            member.prefill -= sum(prefill)
