"""Bodies that once cost far more than they are worth. Each has the status that it must get, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.api.fakes import USER

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, COMPLETIONS = "/v1/messages", "/v1/completions"


@dataclass(frozen=True)
class Attack:
    """`make` builds the body when it is needed: some have tens of megabytes."""

    name: str
    path: str
    make: Callable[[], bytes]
    status: int
    names: str

    @property
    def body(self) -> bytes:
        return self.make()


def chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "m", "messages": USER} | fields).encode()


def body(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def raw(head: bytes, repeated: bytes, count: int, tail: bytes) -> Callable[[], bytes]:
    return lambda: head + repeated * count + tail


def many_biases() -> bytes:
    return b'{"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}}"


def worst_health(url: str, *acts: Callable[[], object]) -> float:
    """Seconds of the slowest answer of `/health` while all of these are done, each on a thread of its own."""
    worst = 0.0
    with ThreadPoolExecutor(len(acts)) as pool, httpx.Client(base_url=url, timeout=60) as client:
        begun = [pool.submit(act) for act in acts]
        while not all(each.done() for each in begun):
            asked = time.monotonic()
            assert client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.005)
    for each in begun:
        each.result()
    return worst


ATTACKS = [
    Attack("numbers for messages, 1 MB", CHAT, raw(b'{"messages":[', b"1,", 15_000, b"1]}"), 400, "messages[0]"),
    Attack("numbers for messages, 6 MB", CHAT, raw(b'{"messages":[', b"1,", 3_000_000, b"1]}"), 413, "JSON values"),
    Attack("too many messages", CHAT, raw(b'{"messages":[', b"1,", 400_000, b"1]}"), 400, "messages: at most"),
    Attack("the same to Anthropic's", MESSAGES, raw(b'{"messages":[', b"1,", 400_000, b"1]}"), 400, "messages"),
    Attack("too many items", RESPONSES, raw(b'{"input":[', b"1,", 400_000, b"1]}"), 400, "input"),
    Attack("60 MB of objects", CHAT, raw(b'{"messages":[', b"{},", 20_000_000, b"1]}"), 413, "JSON values"),
    Attack("60 MB of brackets", CHAT, raw(b"", b"[", 60_000_000, b""), 400, "nested too deeply"),
    Attack("60 MB of escapes", CHAT, raw(b'{"messages":"', b"\\n", 30_000_000, b'"}'), 413, "backslashes"),
    Attack("two million biases", CHAT, many_biases, 413, "body"),
    Attack("60,000 biases", CHAT, chat(logit_bias={str(i): 1 for i in range(60_000)}), 400, "logit_bias: at most"),
    Attack("a bias of 5,000 digits", CHAT, chat(logit_bias={"9" * 5000: 1}), 400, "logit_bias.999"),
    Attack("64 stop strings of 20 kB", CHAT, chat(stop=["x" * 20_000 + str(i) for i in range(64)]), 400, "stop[0]"),
    Attack("64 stop strings of 1 kB", CHAT, chat(stop=["x" * 1_000 + str(i) for i in range(64)]), 400, "stop: at most"),
    Attack("a model's name of 5 MB", CHAT, chat(model="m" * 5_000_000), 400, "model: at most"),
    Attack("a user of 5 MB", CHAT, chat(user="u" * 5_000_000), 400, "user: at most"),
    Attack("a session of 5 MB", CHAT, chat(metadata={"session_id": "s" * 5_000_000}), 400, "session_id: at most"),
    Attack("5,000 tools", CHAT, chat(tools=[{"name": str(i)} for i in range(5_000)]), 400, "tools: at most"),
    Attack("a tool's name of 5 MB", CHAT, chat(tools=[{"function": {"name": "f" * 5_000_000}}]), 400, "tools[0]"),
    Attack("a role of 5 MB", CHAT, chat(messages=[{"role": "r" * 5_000_000}]), 400, "messages[0].role"),
    Attack("arguments 3,000 deep", CHAT, raw(b'{"metadata":', b'{"a":', 3_000, b"1" + b"}" * 3_001), 400, "nested"),
    Attack("an integer of 5,000 digits", CHAT, raw(b'{"seed":', b"9", 5_000, b"}"), 400, "too many digits"),
    Attack("a seed of 400 digits", CHAT, chat(seed=10**400), 400, "seed"),
    Attack("a number without end", CHAT, raw(b'{"temperature":', b"9", 1, b"e999}"), 400, "too large"),
    Attack("not a number", CHAT, raw(b'{"temperature":', b"NaN", 1, b"}"), 400, "NaN is not JSON"),
    Attack("half an object", CHAT, lambda: b"{", 400, "body"),
    Attack("a list", CHAT, lambda: b"[]", 400, "body"),
    Attack("null", CHAT, lambda: b"null", 400, "body"),
    Attack("not UTF-8", CHAT, raw(b'{"messages":"', b"\xed\xa0\x80", 1, b'"}'), 400, "not UTF-8"),
    Attack("UTF-16", CHAT, lambda: '{"messages":[]}'.encode("utf-16"), 400, "not UTF-8"),
    Attack("a window of 2**63 tokens", CHAT, chat(repetition_context_size=2**63 - 1), 400, "repetition_context_size"),
    Attack("1,000 variables", CHAT, chat(chat_template_kwargs={f"v{i}": 1 for i in range(1000)}), 400, "chat"),
    Attack("100 prompts", COMPLETIONS, body(prompt=["x"] * 100), 400, "prompt: at most"),
    Attack("a token id of 400 digits", COMPLETIONS, body(prompt=[10**400]), 400, "prompt"),
    Attack("1,000 include words", RESPONSES, body(input="x", include=["a"] * 1000), 400, "include"),
]
