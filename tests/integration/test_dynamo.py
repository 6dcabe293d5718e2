"""Dynamo's own selector reads the KV events of two nodes, and chooses the node that `explain` chooses.

Needs `ai-dynamo-runtime`, which is in no list of requirements (it has no wheel for macOS): installed beside the tests,
or in the environment of another interpreter that ``DYNAMO_PYTHON`` names. `start_llm` runs here without a model: a node
is its prompt room, its KV store and its publisher. A router's tokens are the template applied to what the client sends.
"""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from start_llm.core.messages import Message
from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.publisher import KVEventPublisher
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import RestorePlan
from start_llm.prompt.pipeline import Pipeline
from tests.kvcache.tiny import known_cache
from tests.prompt.client import ECHOES, READ, odd_tokens, pipeline, raw_answer, request
from tests.prompt.models import EOS, model

PYTHON = os.environ.get("DYNAMO_PYTHON") or (sys.executable if importlib.util.find_spec("dynamo") else "")
WAIT_SECONDS = 60.0
PROMPTS = 500
TOKEN_BYTES = 8  # of a known_cache
FAMILY = "qwen3"
WORDS = (
    "src/calc.py",
    "read",
    "the",
    "file",
    "add",
    "test",
    "fix",
    "helper",
    "returns",
    "list",
    "error",
    "second",
    "now",
)


@pytest.fixture(scope="module")
def selector() -> Iterator[str]:
    if not PYTHON:
        pytest.skip("ai-dynamo-runtime is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, "-m", "dynamo.select_service", "--port", str(port)])
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
    pipe: Pipeline = field(default_factory=lambda: pipeline(FAMILY))
    store: KVStore = field(init=False)
    events: KVEventPublisher = field(init=False)

    def __post_init__(self) -> None:
        self.events = KVEventPublisher("tcp://127.0.0.1:0")
        config = StoreConfig(budget_bytes=40_000 * TOKEN_BYTES)
        self.store = KVStore(LayerKit(lambda: known_cache([])), config, listener=self.events)
        self.events.start()

    def reused(self, asked: Any) -> int:
        """What `explain` would say."""
        tokens = self.pipe.prepare(asked, thinking=True).prompt.tokens
        return self.store.peek(as_tokens(tokens), len(tokens) - 1).length

    def answer(self, asked: Any, answer: Message, number: int, *, odd: bool) -> None:
        prepared = self.pipe.prepare(asked, thinking=True)
        tokenizer = model(FAMILY)[1]
        text = raw_answer(FAMILY, answer, prepared.rendering.in_reasoning)
        generated = odd_tokens(tokenizer, text, number) if odd else tokenizer.encode(text)
        tokens = (*generated, tokenizer.special_tokens[EOS[FAMILY][0]])
        whole = (*prepared.prompt.tokens, *tokens)
        self.store.put(whole, known_cache(list(whole)), session=asked.session)
        self.pipe.record(prepared, answer, tokens)
        self.events.announce(self.pipe.plain(prepared, answer, tokens), whole, self.store.peek)

    def published(self) -> None:
        """Returns when all that happened before was sent, and the selector has had time to read it."""
        done = threading.Event()
        self.events.announce([0], [0], lambda tokens, limit: (done.set(), RestorePlan(0, 0, 0))[1])
        assert done.wait(WAIT_SECONDS)
        time.sleep(0.03)  # the selector has no mark of how far it has read


@dataclass
class Conversation:
    chance: random.Random
    system: Message
    node: int
    echo: Callable[[Message], Message]
    session: str
    messages: list[Message] = field(default_factory=list)

    def text(self, most: int) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randrange(20, most)))

    def ask(self) -> Any:
        self.messages = self.messages or [self.system]
        self.messages.append(Message("user", self.text(150)))
        return request(self.messages, (READ,), session=self.session)


def routers_tokens(asked: Any) -> list[int]:
    """Made with nothing of this project but the tokenizer: the template, and the client's messages."""
    template, tokenizer = model(FAMILY)
    messages = [{"role": message.role, "content": message.content} for message in asked.messages]
    for message, made in zip(asked.messages, messages, strict=True):
        if message.reasoning is not None:
            made["reasoning_content"] = message.reasoning
    tools = [tool.as_function() for tool in asked.tools]
    return tokenizer.encode(template.render(messages, tools, True))


def agreement(selector: str, name: str, echo: Callable[[Message], Message], *, odd: bool, reasoning: bool) -> float:
    """Part of `PROMPTS` requests for which the selector's node is one of those with the most stored."""
    chance = random.Random(name)
    nodes = [Node(number) for number in (1, 2)]
    try:
        for node in nodes:
            worker = {
                "worker_id": node.number,
                "model_name": name,
                "endpoint": f"http://127.0.0.1:{node.number}",
                "kv_events_endpoint": node.events.endpoint,
                "replay_endpoint": node.events.replay,
                "block_size": 64,
            }
            httpx.post(f"{selector}/workers", json=worker, timeout=WAIT_SECONDS).raise_for_status()
        systems = [Message("system", f"You are agent {n}. " + " ".join(chance.choices(WORDS, k=400))) for n in range(3)]
        talks: list[Conversation] = []
        agreed, reused = 0, 0
        for number in range(PROMPTS):
            if len(talks) < 12 or chance.random() < 0.08:
                found = Conversation(chance, chance.choice(systems), chance.randrange(2), echo, f"{name}-{number}")
                talks.append(found)
                talks = talks[-16:]
            talk = chance.choice(talks)
            if chance.random() < 0.05 and len(talk.messages) > 4:  # goes on from an earlier place
                del talk.messages[-2:]
            asked = talk.ask()
            wanted = [node.reused(asked) for node in nodes]
            chosen = select(selector, name, routers_tokens(asked))
            agreed += wanted[chosen - 1] >= max(wanted) - 64  # a router's unit is a block
            reused += max(wanted) > 64
            answer = Message("assistant", talk.text(80), "Let me see. " + talk.text(60) if reasoning else None)
            nodes[talk.node].answer(asked, answer, number, odd=odd)
            nodes[talk.node].published()
            talk.messages.append(echo(answer))
        assert reused > PROMPTS * 0.8
        assert all(node.store.stats()["evicted"] > 0 for node in nodes)
        return agreed / PROMPTS
    finally:
        for node in nodes:
            node.events.stop()


def select(selector: str, name: str, tokens: list[int]) -> int:
    answer = httpx.post(f"{selector}/select", json={"model_name": name, "token_ids": tokens}, timeout=WAIT_SECONDS)
    return int(answer.raise_for_status().json()["worker_id"])


@pytest.mark.thorough
@pytest.mark.parametrize("reasoning", [False, True])
def test_append_only_clients_are_sent_where_explain_sends_them(selector: str, reasoning: bool) -> None:
    share = agreement(selector, f"append-{reasoning}", ECHOES["kept"], odd=False, reasoning=reasoning)
    print(f"append-only, reasoning {reasoning}: {share:.1%}")
    assert share >= 0.99


@pytest.mark.thorough
@pytest.mark.parametrize("echo", ["stripped", "in content"])
def test_other_clients_are_nearly_always(selector: str, echo: str) -> None:
    share = agreement(selector, f"other-{echo.split()[0]}", ECHOES[echo], odd=True, reasoning=True)
    print(f"{echo}, tokens of the model's own: {share:.1%}")
    assert share >= 0.95
