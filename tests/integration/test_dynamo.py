"""Dynamo's own selector reads the KV events of two nodes, and chooses the node that `explain` chooses.

Needs `ai-dynamo-runtime`, which is in no list of requirements (it has no wheel for macOS): installed beside the tests,
or in the environment of another interpreter that ``DYNAMO_PYTHON`` names. `start_llm` runs here without a model: a node
is its prompt room, its KV store and its publisher. A router's tokens are the template applied to what the client sends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import pytest

from start_llm.core.messages import Message, ToolCall
from start_llm.host.ports import free_port
from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.publisher import KVEventPublisher
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import RestorePlan
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared
from start_llm.proxy.routing import route_key
from tests.kvcache.tiny import known_cache
from tests.prompt.client import CLAUDE, ECHOES, OPENCLAW, READ, numbered, odd_tokens, pipeline, raw_answer, request
from tests.prompt.models import EOS, model

PYTHON = os.environ.get("DYNAMO_PYTHON") or (sys.executable if importlib.util.find_spec("dynamo") else "")
WAIT_SECONDS = 60.0
PROMPTS = 500
TOKEN_BYTES = 8  # of a known_cache
AT_ONCE = 4
MARK = 1_000_000  # a token that is in no vocabulary
FAMILY = "qwen3"
WORDS = [
    "src/calc.py", "read", "the", "file", "add", "test", "fix", "helper", "returns", "list", "error", "second", "now",
]  # fmt: skip


@dataclass(frozen=True)
class Habit:
    """How a client sends its conversation again."""

    echo: Callable[[Message], Message] = ECHOES["kept"]
    reasoning: bool = True
    odd: bool = True  # the model's tokens are not those that a tokenizer makes of its text
    calls: bool = False  # every second answer calls a tool
    first: str = "You are agent {}."
    # the messages as they are sent at the n-th request of all
    sends: Callable[[list[Message], int], list[Message]] = lambda messages, number: messages
    # the name of the conversation that the router is told: it keeps requests with one name at one node
    name_for_router: Callable[[Any], str] | None = None
    is_named: bool = True  # the client sends a name of its conversation
    helpers: bool = False  # a third of the conversations are of sub-agents, with the name of their caller


def with_line(every: int, change: Callable[[str, int], str]) -> Callable[[list[Message], int], list[Message]]:
    """A line of the system text is another one after so many requests of the conversation."""

    def send(messages: list[Message], number: int) -> list[Message]:
        turn = sum(message.role == "assistant" for message in messages) // every
        return [replace(messages[0], content=change(messages[0].content, turn)), *messages[1:]]

    return send


def with_clock(every: int) -> Callable[[list[Message], int], list[Message]]:
    def change(text: str, turn: int) -> str:
        first, _, rest = text.partition(" ")
        return f"{first}\nCurrent time: 2026-11-23 {10 + turn // 60}:{turn % 60:02d}\n{rest}"

    return with_line(every, change)


def with_modes(every: int) -> Callable[[list[Message], int], list[Message]]:
    """One of two modes at the end: a plan, then the work."""
    modes = ("You only plan. Change nothing.", "You do what was planned.")
    return with_line(every, lambda text, turn: f"{text}\n{modes[turn % 2]}")


def with_message_id(messages: list[Message], number: int) -> list[Message]:
    *before, last = messages
    return [*before, replace(last, content=f"{last.content}\n[message_id: {number:08x}]")]


def with_reminder(messages: list[Message], number: int) -> list[Message]:
    *before, last = messages
    reminder = f"<system-reminder>\n{number} files have changed.\n</system-reminder>"
    return [*before, replace(last, content=f"{last.content}\n{reminder}")]


@cache
def template_and_tokenizer() -> Any:
    """To make them takes as long as a prompt."""
    return model(FAMILY)


def clients_name(asked: Any) -> str:
    return str(asked.session)


def proxys_name(asked: Any) -> str:
    """What this project's proxy knows a conversation by that its client does not name."""
    messages = [{"role": message.role, "content": message.content} for message in asked.messages]
    return route_key({"messages": messages, "tools": [tool.as_function() for tool in asked.tools]}, {}).conversation[0]


OTHERS = {
    "leaves reasoning out": Habit(ECHOES["stripped"]),
    "reasoning in the text": Habit(ECHOES["in content"]),
    "writes calls anew": Habit(ECHOES["stripped and reserialised"], calls=True),
    "message ids": Habit(sends=with_message_id, first=f"{OPENCLAW} {{}}."),
    "reminders": Habit(sends=with_reminder, first=f"{CLAUDE} {{}}."),
    "sub-agents": Habit(ECHOES["stripped"], calls=True, helpers=True),
    "sub-agents, named like their callers": Habit(
        ECHOES["stripped"], calls=True, helpers=True, name_for_router=clients_name
    ),
    "modes, each fourth turn": Habit(sends=with_modes(4), is_named=False),
    "modes, a name by the proxy's rule": Habit(sends=with_modes(4), name_for_router=proxys_name, is_named=False),
    "modes, named": Habit(sends=with_modes(4), name_for_router=clients_name),
    "clock, named": Habit(sends=with_clock(1), name_for_router=clients_name),
    "clock, a name by the proxy's rule": Habit(sends=with_clock(1), name_for_router=proxys_name, is_named=False),
    "clock each fourth turn, a name by the proxy's rule": Habit(
        sends=with_clock(4), name_for_router=proxys_name, is_named=False
    ),
}
CLOCKS = {
    "clock, each turn": Habit(sends=with_clock(1), is_named=False),
    "clock, each fourth turn": Habit(sends=with_clock(4), is_named=False),
}


@pytest.fixture(scope="module")
def selector() -> Iterator[str]:
    if not PYTHON:
        pytest.skip("ai-dynamo-runtime is not installed")
    port = free_port()
    command = [PYTHON, "-m", "dynamo.select_service", "--port", str(port), "--session-affinity-ttl-secs", "3600"]
    process = subprocess.Popen(command, env=os.environ | {"DYN_LOG": "error"})  # else a line for each prompt
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                httpx.get(f"{url}/workers", timeout=5)
                break
            except httpx.TransportError:
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


@dataclass
class Node:
    number: int
    tokens: int = 40_000  # of stored KV
    pipe: Pipeline = field(default_factory=lambda: pipeline(FAMILY))
    store: KVStore = field(init=False)
    events: KVEventPublisher = field(init=False)
    marks: int = 0
    last: tuple[Any, Prepared] | None = None  # the request that was prepared last

    def __post_init__(self) -> None:
        self.events = KVEventPublisher("tcp://127.0.0.1:0")
        config = StoreConfig(budget_bytes=self.tokens * TOKEN_BYTES)
        self.store = KVStore(LayerKit(lambda: known_cache([])), config, listener=self.events)
        self.events.start()

    def prepared(self, asked: Any) -> Prepared:
        """The same for a question and the request after it: nothing happens in between."""
        if self.last is None or self.last[0] is not asked:
            self.last = (asked, self.pipe.prepare(asked, thinking=True))
        return self.last[1]

    def reused(self, asked: Any) -> int:
        """What `explain` would say."""
        tokens = self.prepared(asked).prompt.tokens
        return self.store.peek(as_tokens(tokens), len(tokens) - 1).length

    def answer(self, asked: Any, answer: Message, number: int, *, odd: bool) -> None:
        prepared = self.prepared(asked)
        tokenizer = template_and_tokenizer()[1]
        text = raw_answer(FAMILY, answer, prepared.rendering.in_reasoning)
        generated = odd_tokens(tokenizer, text, number) if odd else tokenizer.encode(text)
        tokens = (*generated, tokenizer.special_tokens[EOS[FAMILY][0]])
        whole = (*prepared.prompt.tokens, *tokens)
        self.store.put(whole, known_cache(list(whole)), session=asked.session)
        self.pipe.record(prepared, answer, tokens)
        for plain in self.pipe.plain(prepared, answer, tokens):
            self.events.announce(plain, whole, self.store.peek)

    def published(self, selector: str, name: str) -> None:
        """Returns when the selector has read all that happened before: it reads a node's events in their order."""
        self.marks += 1
        mark = [MARK + self.marks] * 64
        self.events.announce(mark, mark, lambda tokens, limit: RestorePlan(64, 64, 64))
        until = time.monotonic() + WAIT_SECONDS
        body = {"model_name": name, "token_ids": mark}
        while True:
            found = post(f"{selector}/overlap_scores", body)
            if any(each["worker_id"] == self.number and each["device_blocks"] for each in found["workers"]):
                return
            assert time.monotonic() < until, found
            time.sleep(0.005)


@dataclass
class Conversation:
    chance: random.Random
    system: Message
    node: int
    habit: Habit
    session: str  # the client's name of it
    messages: list[Message] = field(default_factory=list)

    def text(self, most: int) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randrange(20, most)))

    def ask(self, number: int) -> Any:
        self.messages = self.messages or [self.system]
        calls = self.messages[-1].tool_calls
        self.messages.append(Message("user", self.text(150)))
        if calls:
            self.messages[-1] = replace(self.messages[-1], role="tool", tool_call_id=calls[0].id)
        return request(
            self.habit.sends(self.messages, number), (READ,), session=self.session if self.habit.is_named else None
        )

    def answer(self, number: int) -> Message:
        reasoning = "Let me see. " + self.text(60) if self.habit.reasoning else None
        if not self.habit.calls or number % 2:
            return Message("assistant", self.text(80), reasoning)
        arguments = json.dumps({"path": self.text(30), "limit": number})
        return Message("assistant", "", reasoning, (ToolCall(numbered(number), "read", arguments),))


def begun(
    talks: list[Conversation], systems: list[Message], habit: Habit, chance: random.Random, session: str
) -> Conversation:
    """A new conversation, of a user or of a sub-agent."""
    callers = [talk for talk in talks if talk.system is not systems[-1]]
    if habit.helpers and callers and chance.random() < 1 / 3:
        return Conversation(chance, systems[-1], chance.randrange(2), habit, chance.choice(callers).session)
    return Conversation(chance, chance.choice(systems), chance.randrange(2), habit, session)


def routers_tokens(asked: Any) -> list[int]:
    """Made with nothing of this project but the tokenizer: the template, and the client's messages."""
    template, tokenizer = template_and_tokenizer()
    messages: list[dict[str, Any]] = [{"role": each.role, "content": each.content} for each in asked.messages]
    for message, made in zip(asked.messages, messages, strict=True):
        if message.reasoning is not None:
            made["reasoning_content"] = message.reasoning
        if message.tool_calls:
            made["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ]
    tools = [tool.as_function() for tool in asked.tools]
    return tokenizer.encode(template.render(messages, tools, True))


@contextmanager
def known_nodes(selector: str, name: str) -> Iterator[list[Node]]:
    """Two nodes that the selector knows for a model of this name."""
    nodes = [Node(1), Node(2)]
    try:
        for node in nodes:
            worker: dict[str, Any] = {"worker_id": node.number, "model_name": name, "block_size": 64}
            worker |= {"endpoint": f"http://127.0.0.1:{node.number}", "kv_events_endpoint": node.events.endpoint}
            worker["replay_endpoint"] = node.events.replay
            httpx.post(f"{selector}/workers", json=worker, timeout=WAIT_SECONDS).raise_for_status()
        yield nodes
    finally:
        for node in nodes:
            node.events.stop()


def agreement(selector: str, name: str, habit: Habit) -> float:
    """Part of `PROMPTS` requests for which the selector's node is one of those with the most stored.

    A conversation stays at a node, whatever the selector says; one that the router is told the name of goes where the
    selector sends it.
    """
    chance = random.Random(name)
    texts = [" ".join(chance.choices(WORDS, k=400)) for _ in range(3)]
    systems = [Message("system", f"{habit.first.format(number)} {text}") for number, text in enumerate(texts)]
    talks: list[Conversation] = []
    agreed, reused, sent, reserved = 0, 0, [0, 0], deque[str]()
    with known_nodes(selector, name) as nodes:
        for number in range(PROMPTS):
            if len(talks) < 12 or chance.random() < 0.08:
                talks.append(begun(talks, systems, habit, chance, f"{name}-{number}"))
                talks = talks[-16:]
            talk = chance.choice(talks)
            if chance.random() < 0.05 and len(talk.messages) > 4:  # goes on from an earlier place
                del talk.messages[-2:]
            asked = talk.ask(number)
            wanted = [node.reused(asked) for node in nodes]
            session = habit.name_for_router(asked) if habit.name_for_router else None
            tokens = routers_tokens(asked)
            chosen = reserve(selector, name, tokens, session, reserved) if session else select(selector, name, tokens)
            talk.node = chosen - 1 if session else talk.node
            sent[talk.node] += 1
            agreed += wanted[chosen - 1] >= max(wanted) - 64  # a router's unit is a block
            reused += max(wanted) > 64
            answer = talk.answer(number)
            nodes[talk.node].answer(asked, answer, number, odd=habit.odd)
            nodes[talk.node].published(selector, name)
            talk.messages.append(habit.echo(answer))
        print(f"{name}: {agreed / PROMPTS:.1%}, requests of each node: {sent}")
        assert reused > PROMPTS * 0.8 and min(sent) > PROMPTS * 0.2
        assert all(node.store.stats()["evicted"] > 0 for node in nodes)
    return agreed / PROMPTS


def post(url: str, body: dict[str, Any]) -> Any:
    return httpx.post(url, json=body, timeout=WAIT_SECONDS).raise_for_status().json()


def select(selector: str, name: str, tokens: list[int]) -> int:
    """The number of the node."""
    return int(post(f"{selector}/select", {"model_name": name, "token_ids": tokens})["worker_id"])


def reserve(selector: str, name: str, tokens: list[int], session: str, reserved: deque[str]) -> int:
    """The number of the node; the session is bound to it.

    `AT_ONCE` answers are not ended, so the selector knows which node has less to do. One that knows of none may send
    all to one node, and agrees by that alone.
    """
    body = {"model_name": name, "token_ids": tokens, "session_id": session}
    answer = post(f"{selector}/select_and_reserve", body)
    reserved.append(answer["selection_id"])
    if len(reserved) > AT_ONCE:
        url = f"{selector}/reservations/{reserved.popleft()}"
        httpx.delete(url, timeout=WAIT_SECONDS).raise_for_status()
    return int(answer["worker_id"])


APPENDING = {
    f"append-only, reasoning {reasoning}, calls {calls}": Habit(odd=False, reasoning=reasoning, calls=calls)
    for reasoning, calls in ((False, False), (True, False), (True, True))
}


@pytest.mark.thorough
@pytest.mark.parametrize("habit", [*APPENDING, *OTHERS])
def test_clients_are_sent_where_explain_sends_them(selector: str, habit: str) -> None:
    share = agreement(selector, habit, (APPENDING | OTHERS)[habit])
    assert share >= (0.99 if habit in APPENDING else 0.95)


@pytest.mark.thorough
@pytest.mark.parametrize("habit", CLOCKS)
def test_a_clock_in_the_system_text_hides_what_is_behind_it(selector: str, habit: str) -> None:
    """Without a name of the conversation. No stored block can have a time that nobody knew."""
    assert agreement(selector, habit, CLOCKS[habit]) >= 0.4, "half of them are luck"
